"""Reading over HTTP from a server with faults: waited for if they may pass, else named."""

import asyncio
import dataclasses
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.data.streams import png, write_shards
from tests.data.tars import write_tar
from tests.errors import check, raises, refused
from tests.tiers import tiered
from tests.web import FaultyServer, free_port
from trainyard.data.decode.crops import RandomResizedCrop
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.table import Index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.reader import Reader
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.data.storage.open import open_source, remote_file
from trainyard.data.storage.remote import client
from trainyard.data.storage.remote.client import IN_FLIGHT
from trainyard.data.storage.source import Source
from trainyard.errors import DataError

pytestmark = pytest.mark.slow

CONTENT = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def file(faulty: FaultyServer) -> Iterator[Source]:
    (faulty.folder / "file.bin").write_bytes(CONTENT)
    file = open_source(f"{faulty.url}/file.bin")
    faulty.requests.clear()
    yield file
    file.close()


def test_a_file_has_its_size_and_its_bytes(faulty: FaultyServer, file: Source) -> None:
    assert file.size == len(CONTENT)
    assert file.stamp[1] == len(CONTENT)
    for offset, size in ((0, len(CONTENT)), (10, 100_000), (len(CONTENT) - 1, 1), (7, 3), (5, 0)):
        assert file.read(offset, size) == CONTENT[offset : offset + size]
    with pytest.raises(OSError, match=r"file\.bin is truncated or has changed"):
        file.read(len(CONTENT) - 1, 2)


@pytest.mark.parametrize(
    "fault", tiered(["503", "500", "502", "504", "429", "408"], night=["500", "502", "504", "408"])
)
def test_what_may_pass_is_tried_again(
    faulty: FaultyServer, file: Source, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty.faults = [fault, fault]
    assert file.read(0, len(CONTENT)) == CONTENT
    assert len(faulty.requests) == 3
    assert capsys.readouterr().err == ""  # over before it was worth a line


def test_a_broken_transfer_goes_on_where_it_broke(faulty: FaultyServer, file: Source) -> None:
    faulty.faults = ["cut"]
    assert file.read(0, len(CONTENT)) == CONTENT
    half = len(CONTENT) // 2
    assert [asked.offset for asked in faulty.requests] == [0, half]


def test_a_server_that_fails_for_good_is_named(
    faulty: FaultyServer,
    file: Source,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRAINYARD_RETRY_S", "3")
    faulty.faults = ["503"] * 1000
    with raises("storage.gave-up", url=file.name, duration="3 s"):
        file.read(0, 100_000)
    assert capsys.readouterr().err.count("\n") == 1
    assert len(faulty.requests) < 20  # it backs off


@pytest.mark.night
def test_many_threads_that_wait_say_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINYARD_RETRY_S", "2")
    url = f"http://127.0.0.1:{free_port()}/shard.tar"

    def read() -> bool:
        with raises("storage.gave-up", url=url):
            open_source(url)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: read(), range(8))) == 8
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_changes_ends_the_run(faulty: FaultyServer, file: Source) -> None:
    faulty.faults = ["changed"]
    with raises("storage.changed-while-read"):
        file.read(0, 100_000)
    (faulty.folder / "file.bin").write_bytes(CONTENT[:-1])
    with raises("storage.changed-while-read"):
        file.read(0, 100_000)
    (faulty.folder / "file.bin").unlink()
    with raises("storage.gone", reason="the server answers 404 Not Found"):
        file.read(0, 100_000)


@pytest.mark.parametrize(
    ("status", "code"),
    [("404", "storage.gone"), ("403", "storage.gone"), ("401", "storage.no-login")],
)
def test_a_file_that_cannot_be_had_is_named(
    faulty: FaultyServer, file: Source, status: str, code: str
) -> None:
    faulty.faults = [status]
    with pytest.raises((OSError, DataError)):
        open_source(f"{faulty.url}/file.bin")
    faulty.faults = [status]
    with raises(code, url=file.name):
        file.read(0, 100_000)
    assert len(faulty.requests) == 2  # tried once each


def test_a_server_without_ranges_will_do_for_small_files(faulty: FaultyServer) -> None:
    (faulty.folder / "file.bin").write_bytes(CONTENT)
    faulty.faults = ["whole"] * 100
    file = open_source(f"{faulty.url}/file.bin")
    assert file.read(1_000_000, 500_000) == CONTENT[1_000_000:1_500_000]
    assert file.read(7, 20) == CONTENT[7:27]
    assert len(faulty.requests) == 2
    os.truncate(faulty.folder / "file.bin", (16 << 20) + 1)
    file = open_source(f"{faulty.url}/file.bin")
    with raises("storage.no-ranges"):
        file.read(7, 20)


def test_small_reads_close_together_share_a_request(faulty: FaultyServer, file: Source) -> None:
    for offset in range(0, 100_000, 512):
        assert file.read(offset, 512) == CONTENT[offset : offset + 512]
    assert len(faulty.requests) <= 5
    faulty.requests.clear()
    for offset in range(0, len(CONTENT), 500_000):  # far apart: little is read in vain
        assert file.read(offset, 512) == CONTENT[offset : offset + 512]
    assert sum(asked.size for asked in faulty.requests) <= 6 * 8192


@pytest.mark.night
def test_threads_read_one_file_at_once(file: Source) -> None:
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(50):
            offset, size = rng.randrange(2_000_000), rng.choice((100, 4000, 5000, 200_000))
            if file.read(offset, size) != CONTENT[offset : offset + size]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("url", "code", "fields"),
    [
        ("ftp://host/x.tar", "storage.unknown-scheme", {"scheme": "ftp"}),
        ("http://host:port/x.tar", "storage.invalid-url", {"url": "http://host:port/x.tar"}),
        ("http:///x.tar", "storage.invalid-url", {"url": "http:///x.tar"}),
        ("http://me:secret@host:port/x", "storage.invalid-url", {"url": "http://host:port/x"}),
    ],
)
def test_a_url_that_cannot_be_is_named(url: str, code: str, fields: dict[str, object]) -> None:
    with raises(code, **fields):
        open_source(url)


def test_another_part_than_the_one_requested_is_refused(faulty: FaultyServer, file: Source) -> None:
    for fault in ("shifted", "longer", "unranged"):
        faulty.faults = [fault]
        with raises("storage.wrong-range"):
            file.read(5000, 10_000)


@pytest.mark.night
def test_a_burst_of_requests_begins_with_few(faulty: FaultyServer, file: Source) -> None:
    """A server's queue of new connections may be short."""
    client.run(client._end_all())
    client.client_of.cache_clear()
    (faulty.folder / "small").write_bytes(bytes(4096))

    async def burst() -> None:
        await asyncio.gather(*(remote_file(f"{faulty.url}/small").fetch(0, 9) for _ in range(100)))

    faulty.delay_s = 0.2
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(client.run, burst())
        time.sleep(0.1)
        assert faulty.at_once <= 4
        done.result()
    assert 20 <= faulty.most_at_once <= 100


def test_a_file_that_has_moved_is_followed(faulty: FaultyServer, file: Source) -> None:
    (faulty.folder / "old.bin").touch()
    faulty.faults = ["moved"]
    assert open_source(f"{faulty.url}/old.bin").size == len(CONTENT)
    faulty.faults = ["moved"] * 6
    with raises("storage.too-many-redirects"):
        open_source(f"{faulty.url}/old.bin")


def test_the_proxy_of_the_environment_is_asked(
    faulty: FaultyServer, file: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", faulty.url)
    assert open_source("http://data.invalid/file.bin").read(5, 10_000) == CONTENT[5:10_005]
    assert [asked.path for asked in faulty.requests] == ["http://data.invalid/file.bin"] * 2


# --- a loader ---

TRAIN = "digits-train-{000000..000003}.tar"


@pytest.fixture
def digits_there(faulty: FaultyServer, shards: Path) -> Iterator[Index]:
    """The index of shards behind the server with faults."""
    for path in shards.glob("*.tar"):
        shutil.copy(path, faulty.folder)
    index = open_index(f"{faulty.url}/{TRAIN}")
    faulty.requests.clear()
    faulty.most_at_once = 0
    yield index


def batches(index: Index, **changes: Any) -> list[tuple[Any, ...]]:
    spec = LoaderSpec(
        plan=ShuffledPlan(len(index), 32, seed=3),
        crop=RandomResizedCrop(seed=3, scale=(0.5, 1.0), ratio=(0.8, 1.25), flip=0.5),
        image_size=24,
        stop=60,
        threads=2,
    )
    with Loader(index, dataclasses.replace(spec, **changes)) as loader:
        return [(b.ids.tolist(), b.labels.tolist(), b.images_BHWC.tobytes(), b.bad) for b in loader]


@pytest.mark.parametrize("faults", tiered(["none", "passing", "slow"], night=["none", "slow"]))
def test_a_loader_gives_the_batches_of_local_files(
    faulty: FaultyServer, digits_there: Index, shards: Path, faults: str
) -> None:
    here = batches(build_index(str(shards / TRAIN)))
    if faults == "passing":
        kinds = ["503", "cut", "500", "", "429", "", "cut", "408", "", "504"]
        faulty.faults = kinds * 20
    elif faults == "slow":
        faulty.delay_s = 0.1
    assert batches(digits_there) == here
    if faults == "passing":
        assert len(faulty.faults) < 190


def test_a_loader_has_many_requests_in_flight_and_no_more(
    faulty: FaultyServer, shards: Path, tmp_path: Path
) -> None:
    """Images in many small files, so that no two share a range."""
    content = next(shards.glob("*train*.tar")).read_bytes()
    for number in range(40):
        (faulty.folder / f"{number:02d}.tar").write_bytes(content)
    index = open_index(f"{faulty.url}/{{00..39}}.tar")
    faulty.delay_s, faulty.most_at_once = 0.05, 0
    assert len(batches(index, stop=4)) == 4
    assert 20 <= faulty.most_at_once <= IN_FLIGHT


def test_a_shard_costs_no_request_of_its_own(faulty: FaultyServer, digits_there: Index) -> None:
    """Its size and stamp are in the index, and each answer is compared with them."""
    reader = Reader(digits_there)
    for sample in (0, 500, 1000, 1400):
        reader.read(sample)
    assert len({asked.path for asked in faulty.requests}) == 4
    assert len(faulty.requests) == 4


@pytest.mark.parametrize(
    ("fault", "code"), [("changed", "data.changed-since-indexed"), ("gone", "storage.gone")]
)
def test_a_loader_ends_with_the_reason(
    faulty: FaultyServer, digits_there: Index, fault: str, code: str
) -> None:
    shard = faulty.folder / "digits-train-000002.tar"
    if fault == "changed":
        shard.write_bytes(shard.read_bytes()[::-1])
    else:
        shard.unlink()
    with raises(code):
        batches(digits_there)


# --- locations ---


def test_a_refusal_is_told_as_it_is(faulty: FaultyServer, tmp_path: Path) -> None:
    faulty.faults = ["403"] * 1000
    write_tar(faulty.folder / "a.tar", [])
    for name in ("a.tar", "{0..1}.tar"):
        (faulty.folder / "0.tar").touch()
        with raises("storage.failed"):
            open_index(f"{faulty.url}/{name}")
    (faulty.folder / "dataset.json").touch()
    check(
        refused("train", "debug", "--data", faulty.url),
        "data.missing-split",
        names="train and no val",
    )


def test_two_slashes_running_are_asked_for(faulty: FaultyServer, tmp_path: Path) -> None:
    write_shards(faulty.folder / "x", [2])
    index = open_index(f"{faulty.url}/x//part-000.tar")
    assert Reader(index).read(0) == png(0)
    assert {asked.path for asked in faulty.requests if asked.path.endswith(".tar")} == {
        "/x//part-000.tar"
    }
