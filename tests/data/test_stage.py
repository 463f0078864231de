"""Copies on a node's own disk: fetched once, whole or absent, whatever dies or fills up."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_line import SHORT, Capture, complaint, run, shown
from tests.data.streams import Server
from tests.data.tars import Patch, write_shard
from tests.data.test_loader import all_batches, spec
from tests.data.test_read import shards
from trainyard.data.batch import COLUMNS, HostBatch
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.reader import Reader
from trainyard.data.reading.staged_copies import Copies
from trainyard.data.reading.stager import Stager, stage_folder
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.data.storage.manifest import Manifest, Shard, Split, write_manifest
from trainyard.data.storage.open import open_source
from trainyard.errors import DataError

GB = 10**9


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.setattr("trainyard.data.reading.stager._LOOK_S", 0.05)
    monkeypatch.setattr("trainyard.data.reading.stager._WAITS_S", (0.01, 0.01))
    yield
    while jobs:
        with jobs.pop() as process:
            process.kill()


# --- sources ---


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "source") as server:
        yield server


def large_shards(folder: Path, count: int = 4, size: int = 1 << 20) -> Index:
    """The index of tars of 16 images of random bytes, of `size` bytes together."""
    generator = np.random.default_rng(1)
    for number in range(count):
        rows = [(generator.bytes(size // 16), 0) for _ in range(16)]
        write_shard(folder / f"shard-{number}.tar", rows)
    return open_index(str(folder / "*.tar"))


def large_remote(server: Server, count: int = 4, size: int = 1 << 20) -> Index:
    large_shards(server.folder, count, size)
    index = open_index(f"{server.url}/shard-{{0..{count - 1}}}.tar")
    server.requests.clear()
    return index


def digit_shards(digits: Path, folder: Path) -> None:
    """The training digits in shards of 100."""
    paths = sorted((digits / "train").rglob("*.png"))
    rows = [(path.read_bytes(), int(path.parent.name)) for path in paths]
    for number in range(0, len(rows), 100):
        path = folder / f"digits-{number // 100:02d}.tar"
        write_shard(path, rows[number : number + 100], suffix="png")


def list_in_manifest(folder: Path) -> None:
    listed = [
        Shard(path.name, 1, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.glob("*.tar"))
    ]
    write_manifest(folder, Manifest("webdataset", None, {"train": Split("*.tar", tuple(listed))}))


# --- jobs ---

jobs: "list[subprocess.Popen[str]]" = []

JOB = """
import json, os, sys, time
from pathlib import Path
from trainyard.data.reading import stager
from trainyard.data.index.table import load_index

stager._BLOCK, stager._LOOK_S = 1 << 16, 0.05
copier = stager.Stager(load_index(Path(sys.argv[1])), sys.argv[2], None)
print(json.dumps(os.getpid()), flush=True)
problem = copier.run()
print(json.dumps([problem, copier.num_made]), flush=True)
"""


def job(index: Index, folder: Path) -> "subprocess.Popen[str]":
    """Another process that stages a data set; it prints its pid, then how it went."""
    command = [sys.executable, "-c", JOB, str(index.path), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    jobs.append(process)
    assert result(process) == process.pid
    return process


def result(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def is_true_soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return found


def is_complete(copies: Copies) -> bool:
    copies.refresh()
    return not copies.missing()


def staged(index: Index, folder: Path, gb: float | None = None) -> Copies:
    """All copies of a data set, made here; still in use."""
    stager = Stager(index, str(folder), gb)
    assert stager.run() is None
    return stager.copies


def check_copies(index: Index, copies: Copies) -> None:
    """The copies are all there, nothing else is, and each is what the source has."""
    assert copies.missing() == []
    names = {name for name in os.listdir(copies.path) if name not in ("stager.lock", "told")}
    assert names == {str(number) for number in range(len(copies))}
    plain = Reader(index)
    for sample in range(len(index)):
        copy = copies.find(sample)
        assert copy is not None
        with open(copy.path, "rb") as file:
            file.seek(copy.offset)
            assert file.read(copy.size) == plain.read(sample)


def same_batches(index: Index, config: LoaderSpec, folder: Path) -> None:
    """Batches with staging are bit for bit those without."""
    pairs = zip(all_batches(index, config), all_batches(index, _with(config, folder)), strict=True)
    for plain, batch in pairs:
        assert_same(batch, plain)
        assert batch.bad == plain.bad


def assert_same(batch: HostBatch, plain: HostBatch) -> None:
    for name in ("images_BHWC", *COLUMNS):
        np.testing.assert_array_equal(getattr(batch, name), getattr(plain, name))


def _with(config: LoaderSpec, folder: Path) -> LoaderSpec:
    return dataclasses.replace(config, stage=str(folder))


# --- fetched once ---


def test_two_processes_fetch_once_and_a_second_job_nothing(tmp_path: Path, server: Server) -> None:
    index = large_remote(server)
    server.pause_s = 0.3  # so that both are at work at the same time
    results = [result(process) for process in [job(index, tmp_path / "node") for _ in range(2)]]
    assert sorted(results) == [[None, 0], [None, 4]]
    sizes = {path.name: path.stat().st_size for path in server.folder.glob("*.tar")}
    assert server.fetched() == sizes
    server.requests.clear()
    assert result(job(index, tmp_path / "node")) == [None, 0]
    copies = staged(index, tmp_path / "node")
    reader = Reader(index, copies)
    contents = [reader.read(sample) for sample in range(len(index))]
    assert server.requests == []
    assert contents == [Reader(index).read(sample) for sample in range(len(index))]
    check_copies(index, copies)


def test_ranks_that_train_over_http_fetch_each_shard_once(
    tmp_path: Path, server: Server, digits: Path
) -> None:
    digit_shards(digits, server.folder)
    index = open_index(f"{server.url}/digits-{{00..14}}.tar")
    config = spec(start=0, stop=44, size=2)
    plain = [all_batches(index, dataclasses.replace(config, rank=rank)) for rank in range(2)]
    server.requests.clear()
    ranks = [dataclasses.replace(_with(config, tmp_path), rank=rank) for rank in range(2)]
    with Loader(index, ranks[0]) as first, Loader(index, ranks[1]) as second:
        copies = Copies(index, tmp_path)
        for number, batches in enumerate(zip(first, second, strict=True)):
            for rank, batch in enumerate(batches):
                assert_same(batch, plain[rank][number])
        assert is_true_soon(lambda: is_complete(copies))
    sizes = {path.name: path.stat().st_size for path in server.folder.glob("*.tar")}
    whole = [path for path, _, size in server.requests if size == sizes[path]]
    assert sorted(whole) == sorted(sizes)
    server.requests.clear()
    for rank in range(2):  # the next job reads nothing from the source
        for expected, batch in zip(plain[rank], all_batches(index, ranks[rank]), strict=True):
            np.testing.assert_array_equal(batch.images_BHWC, expected.images_BHWC)
    assert server.requests == []


def test_training_begins_while_staging_goes_on_and_uses_what_appears(
    tmp_path: Path, server: Server, digits: Path
) -> None:
    digit_shards(digits, server.folder)
    index = open_index(f"{server.url}/digits-{{00..14}}.tar")
    server.pause_s = 0.1  # 15 shards take seconds, while images come at once
    with Loader(index, spec(start=0, stop=10**6, stage=str(tmp_path))) as loader:
        next(loader)
        copies = Copies(index, tmp_path)
        assert copies.missing()  # the first batch did not wait for the copies
        assert is_true_soon(lambda: is_complete(copies))
        for _ in range(12):  # begun before the last copy was there
            next(loader)
        server.requests.clear()
        for _ in range(40):
            next(loader)
        assert server.requests == []


# --- kills ---


def test_a_killed_stager_is_followed_by_another_that_goes_on_in_mid_shard(
    tmp_path: Path, server: Server
) -> None:
    index = large_remote(server)
    server.pause_s = 0.5
    folder = tmp_path / "node"
    first, second = job(index, folder), job(index, folder)
    copies = Copies(index, folder)
    assert is_true_soon(lambda: any(size > 300_000 for size in parts(copies).values()))
    first.send_signal(signal.SIGKILL)
    first.wait()
    (left,) = parts(copies).items()
    before = len(server.requests)
    killed_at = time.monotonic()
    assert is_true_soon(lambda: parts(copies) != dict([left]))
    assert time.monotonic() - killed_at < 5
    server.pause_s = 0
    problem, num_made = result(second)
    assert problem is None
    assert num_made >= 1
    file = f"shard-{left[0].split('.')[0]}.tar"
    again = [(at, size) for path, at, size in server.requests[before:] if path == file]
    # It goes on with the block in which the first was killed; 8 of them were under way.
    assert min(at for at, size in again if size > 1) >= left[1] - (1 << 16)
    copies.refresh()
    check_copies(index, copies)


def parts(copies: Copies) -> dict[str, int]:
    """Copies in the making, and how many bytes they have."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in copies.path.glob("*.part"):
            found[path.name] = path.stat().st_size
    return found


def test_kills_at_any_moment_leave_whole_copies_or_none(tmp_path: Path, server: Server) -> None:
    index = large_remote(server, count=6, size=320_000)
    server.pause_s = 0.005
    source = {number: (server.folder / f"shard-{number}.tar").read_bytes() for number in range(6)}
    copies = Copies(index, tmp_path)
    for moment in np.random.default_rng(0).uniform(0, 0.1, 8):
        process = job(index, tmp_path)
        time.sleep(moment)
        process.kill()
        process.wait()
        for path in copies.path.iterdir():
            if path.name.isdigit():
                assert path.read_bytes() == source[int(path.name)]
    assert result(job(index, tmp_path))[0] is None
    copies.refresh()
    check_copies(index, copies)


def test_a_part_that_was_damaged_is_made_anew(tmp_path: Path) -> None:
    """Of a power cut, say; the checksum tells."""
    index = large_shards(tmp_path)
    list_in_manifest(tmp_path)
    copies = Copies(index, tmp_path / "node")
    size = (tmp_path / "shard-2.tar").stat().st_size
    (copies.path / f"2.{size}.part").write_bytes(bytes(size - 1000))
    check_copies(index, staged(index, tmp_path / "node"))


def test_the_loader_ends_at_once_while_it_stages(tmp_path: Path, server: Server) -> None:
    index = large_remote(server)
    server.pause_s = 0.5
    plan = ShuffledPlan(len(index), 8, seed=0)
    loader = Loader(index, spec(plan=plan, start=0, stop=9, stage=str(tmp_path)))
    copies = Copies(index, tmp_path)
    assert is_true_soon(lambda: bool(parts(copies)))
    asked_at = time.monotonic()
    loader.close()
    assert time.monotonic() - asked_at < 5  # a shard takes far longer
    assert loader._process.returncode is not None
    with copies.leading() as leads:  # its lock is gone with it
        assert leads


# --- jobs at once ---


def test_jobs_that_evict_each_others_copies_never_read_wrong_bytes(tmp_path: Path) -> None:
    """Three data sets, room for one and a half, a process for each that comes and goes."""
    paths = []
    for number in range(3):
        (tmp_path / f"data-{number}").mkdir()
        index, _ = shards(tmp_path / f"data-{number}", [20] * 4)
        paths.append(str(index.path))
    size = sum(path.stat().st_size for path in (tmp_path / "data-0").glob("*.tar"))
    command = [sys.executable, "-c", HAMMER, str(tmp_path / "node"), str(1.5 * size / GB)]
    hammers = [
        subprocess.Popen([*command, path], stdout=subprocess.PIPE, text=True)
        for path in paths
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in hammers]
    assert [process.returncode for process in hammers] == [0] * 6
    made, from_copies = np.array([json.loads(output) for output in outputs]).T
    assert made.sum() > 12  # evicted and made again
    assert from_copies.all()
    used = sum(path.stat().st_size for path in (tmp_path / "node").rglob("*") if path.is_file())
    assert used <= 1.5 * size


HAMMER = """
import json, random, sys, time
from pathlib import Path
from trainyard.data.reading import stager
from trainyard.data.index.table import load_index
from trainyard.data.reading.reader import Reader

stager._LOOK_S = 0.01
folder, gb, path = sys.argv[1:]
index = load_index(Path(path))
plain = Reader(index)
expected = [plain.read(sample) for sample in range(len(index))]
made = from_copies = 0
for _ in range(30):
    copier = stager.Stager(index, folder, float(gb))
    copier.run()
    made += copier.num_made
    from_copies += len(copier.copies) - len(copier.copies.missing())
    reader = Reader(index, copier.copies)
    for sample in range(len(index)):
        copy = copier.copies.find(sample)
        if copy is not None:
            assert Path(copy.path).exists()  # in use: not evicted
        assert reader.read(sample) == expected[sample]
    copier.copies.close()
    time.sleep(random.uniform(0, 0.03))
print(json.dumps([made, from_copies]))
"""


# --- damaged sources ---


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_source_that_differs_from_its_checksum_is_tried_again_then_named(
    tmp_path: Path, server: Server, damage: str
) -> None:
    large_shards(server.folder)
    list_in_manifest(server.folder)
    shard = server.folder / "shard-2.tar"
    content = bytearray(shard.read_bytes())
    if damage == "truncated":
        content = content[:-1024]  # of the padding: the index does not see it
    else:
        content[5000] ^= 1
    shard.write_bytes(content)
    index = open_index(f"{server.url}/shard-{{0..3}}.tar")
    server.requests.clear()
    stager = Stager(index, str(tmp_path / "node"), None)
    message = r"/shard-2.tar: its checksum differs from dataset.json's; it is damaged or was repl"
    with pytest.raises(DataError, match=message):
        stager.run()
    assert server.fetched()["shard-2.tar"] == 3 * len(content)
    assert parts(stager.copies) == {}
    assert not (stager.copies.path / "2").exists()


def test_a_source_that_is_damaged_on_its_way_is_fetched_again(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    index = large_shards(tmp_path)
    list_in_manifest(tmp_path)
    opened: list[str] = []

    def garbled(name: str) -> Any:
        source: Any = open_source(name)
        read, is_garbled = source.read, name.endswith("shard-1.tar") and opened.count(name) < 2
        opened.append(name)
        source.read = lambda at, size: read(at, size)[:-1] + b"!" if is_garbled else read(at, size)
        return source

    monkeypatch.setattr("trainyard.data.reading.stager.open_source", garbled)
    check_copies(index, staged(index, tmp_path / "node"))
    assert opened.count(str(tmp_path / "shard-1.tar")) == 3


def test_a_source_without_checksum_that_changed_since_it_was_indexed(tmp_path: Path) -> None:
    index = large_shards(tmp_path)
    with open(tmp_path / "shard-3.tar", "ab") as file:
        file.write(bytes(512))
    with pytest.raises(DataError, match=r"shard-3.tar: it has changed since it was indexed: start"):
        Stager(index, str(tmp_path / "node"), None).run()


def test_a_damaged_shard_ends_training_with_one_line(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    digit_shards(digits, tmp_path)
    list_in_manifest(tmp_path)
    with open(tmp_path / "digits-07.tar", "ab") as file:
        file.write(bytes(512))
    index = open_index(str(tmp_path / "*.tar"))
    config = spec(start=0, stop=10**6, stage=str(tmp_path / "node"))
    with Loader(index, config) as loader, pytest.raises(DataError) as caught:
        for _ in loader:
            pass
    assert "digits-07.tar: its checksum differs from dataset.json's" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_shard_that_is_gone_is_left_to_the_source_and_the_others_are_staged(
    tmp_path: Path,
) -> None:
    index = large_shards(tmp_path)
    (tmp_path / "shard-1.tar").unlink()
    stager = Stager(index, str(tmp_path / "node"), None)
    problem = stager.run()
    assert stager.copies.missing() == [1]
    assert problem is not None
    assert "ends with 3 of 4 copies, the rest is read from the source" in problem
    assert "shard-1.tar" in problem


# --- room ---


def three_sets(folder: Path) -> list[Index]:
    """Data sets of 4 shards; all have about the same size."""
    return [large_shards(folder / f"data-{number}", size=100_000) for number in range(3)]


def bytes_of(index: Index) -> int:
    return sum(path.stat().st_size for path in Path(index.root).glob("*.tar"))


def test_the_least_recently_used_copies_make_room_under_the_cap(tmp_path: Path) -> None:
    first, second, third = three_sets(tmp_path)
    node, gb = tmp_path / "node", 2.5 * bytes_of(first) / GB
    for index in (first, second):
        staged(index, node, gb).close()
        time.sleep(0.02)
    Copies(first, node).close()  # another job opens it: now the second is the oldest
    newest = staged(third, node, gb)
    check_copies(third, newest)
    assert Copies(first, node).missing() == []
    left = Copies(second, node).missing()
    assert 0 < len(left) < 4  # and no more than was needed
    assert sum(path.stat().st_size for path in node.rglob("*") if path.is_file()) <= gb * GB


def test_room_is_counted_as_by_listing_all_files(tmp_path: Path, monkeypatch: Patch) -> None:
    """Two processes, played by two objects, begin, finish, give up and take over copies."""
    usage = shutil._ntuple_diskusage(10**15, 0, 10**15)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    both = [Copies(index, tmp_path / "node") for index in three_sets(tmp_path)[:2]]
    generator = np.random.default_rng(0)
    begun: list[tuple[Copies, int, Path]] = []
    for number in range(60):
        copies = both[int(generator.integers(2))]
        part = copies.begin(number, int(generator.integers(1, 1000)), None)
        part.write_bytes(bytes(int(part.name.split(".")[1]) // 2))
        begun.append((copies, number, part))
        if number == 40:
            time.sleep(1.1)  # from here on, one relies on its listing of the other
        fate = generator.integers(4) if number > 2 else 3
        if fate < 3:
            copies, number, part = begun.pop(int(generator.integers(len(begun))))
        if fate == 0:
            part.unlink()
        elif fate < 3:
            part.write_bytes(bytes(int(part.name.split(".")[1])))
            copies.finish(number, part)
        files = [path for path in (tmp_path / "node").rglob("*") if path.is_file()]
        whole = [int(path.name.split(".")[1]) for path in files if path.suffix == ".part"]
        whole += [path.stat().st_size for path in files if path.suffix != ".part"]
        growth = sum(whole) - sum(path.stat().st_size for path in files)
        for copies in both:
            assert copies._excess(cap=10) == sum(whole) - 10
            assert copies._excess(None) == growth + 50 * GB - usage.free


@pytest.mark.parametrize("cap", [None, GB])
def test_a_new_copy_needs_no_list_of_those_before(
    tmp_path: Path, monkeypatch: Patch, cap: int | None
) -> None:
    """Else the 27,700 copies of a large folder take a quadratic number of system calls."""
    index, other, _ = three_sets(tmp_path)
    others = staged(other, tmp_path / "node")
    time.sleep(1.1)
    copies = Copies(index, tmp_path / "node")
    listed: list[Path] = []
    scandir = os.scandir

    def counted(path: Path) -> Any:
        listed.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    for number in range(100):
        part = copies.begin(number, 3, cap)
        part.write_bytes(b"abc")
        copies.finish(number, part)
    assert [listed.count(one.path) for one in (copies, others)] == [1, 1]


def test_copies_in_use_are_not_evicted(tmp_path: Path) -> None:
    first, second, third = three_sets(tmp_path)
    node, gb = tmp_path / "node", 2.5 * bytes_of(first) / GB
    used = [staged(first, node, gb), staged(second, node, gb)]
    stager = Stager(third, str(node), gb)
    problem = stager.run()
    assert problem is not None
    assert "copies, the rest is read from the source: there is no room for more" in problem
    assert 0 < len(stager.copies.missing()) < 4  # as many as fit
    for index, copies in zip((first, second), used, strict=True):
        copies.refresh()
        check_copies(index, copies)
    reader = Reader(third, stager.copies)
    assert [reader.read(n) for n in range(64)] == [Reader(third).read(n) for n in range(64)]
    used[0].close()
    assert stager.run() is None
    assert "ends with 0 of 4 copies" in str(Stager(first, str(tmp_path / "x"), 1e-6).run())


@pytest.mark.parametrize(("size", "reserve"), [(10, 1), (100, 5), (30_000, 50)])  # GB
def test_a_disk_that_is_full_for_others_too(
    tmp_path: Path, monkeypatch: Patch, size: int, reserve: int
) -> None:
    """The reserve stays free, and what a part will still need counts as used."""
    first, second, _ = three_sets(tmp_path)
    node, total = tmp_path / "node", size * GB
    disk = reserve * GB + int(1.5 * bytes_of(first))  # free while the folder is empty

    def usage(path: Path) -> Any:
        used = sum(path.stat().st_size for path in node.rglob("*") if path.is_file())
        return shutil._ntuple_diskusage(total, total - disk + used, disk - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    staged(first, node).close()
    copies = staged(second, node)  # makes room on the disk as it does under a cap
    check_copies(second, copies)
    assert 0 < len(Copies(first, node).missing()) < 4
    assert usage(node).free >= reserve * GB
    disk -= bytes_of(first)  # another program fills the disk
    (copies.path / "1").unlink()
    copies.refresh()
    stager = Stager(second, str(node), None)
    assert "no room" in str(stager.run())


def test_a_disk_that_fills_up_while_a_copy_is_made(tmp_path: Path, monkeypatch: Patch) -> None:
    index, *_ = three_sets(tmp_path)
    stager = Stager(index, str(tmp_path / "node"), None)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left on device" in str(stager.run())
    assert parts(stager.copies) == {}
    assert len(stager.copies.missing()) == 4
    usage = shutil._ntuple_diskusage(10 * GB, 10 * GB, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Copies, "begin", lambda self, number, size, cap: _touched(self, number, size))
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        assert "the disk is nearly full" in str(stager.run())
    assert parts(stager.copies) == {}
    assert stager.run() is None


def _touched(copies: Copies, number: int, size: int) -> Path:
    part = copies.path / f"{number}.{size}.part"
    part.touch()
    return part


def test_training_goes_on_without_room_and_says_so_once(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    digit_shards(digits, tmp_path)
    index = open_index(str(tmp_path / "*.tar"))
    config = spec(start=0, stop=5, size=2, stage_gb=1e-6)
    for rank in range(2):
        same_batches(index, dataclasses.replace(config, rank=rank), tmp_path / "node")
    said = capfd.readouterr().err
    assert said.startswith(f"trainyard: staging to {tmp_path / 'node'} on ")
    assert said.endswith(
        "with 0 of 15 copies, the rest is read from the source: there is no room for more\n"
    )
    assert said.count("\n") == 1


# --- folders of images ---


def test_a_folder_of_images_is_copied_in_groups(tmp_path: Path, digits: Path) -> None:
    """Training from the copies goes on without the folder; without a copy of it none is made."""
    shutil.copytree(digits / "train", tmp_path / "train")
    index = open_index(str(tmp_path / "train"))
    plain = all_batches(index, spec())
    copies = staged(index, tmp_path / "node")
    assert len(copies) == 3
    check_copies(index, copies)
    for path in (tmp_path / "train").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    found = all_batches(index, _with(spec(), tmp_path / "node"))
    for batch, expected in zip(found, plain, strict=True):
        assert_same(batch, expected)
        assert batch.bad == []
    stager = Stager(index, str(tmp_path / "other"), None)
    assert "ends with 0 of 3 copies" in str(stager.run())
    assert parts(stager.copies) == {}


def test_images_that_cannot_be_read_are_bad_samples_as_without_staging(
    tmp_path: Path, digits: Path
) -> None:
    shutil.copytree(digits / "train", tmp_path / "train")
    index = open_index(str(tmp_path / "train"))
    gone, changed, broken = (Path(index.locate(sample)[0]) for sample in (3, 700, 701))
    gone.unlink()
    changed.write_bytes(changed.read_bytes() + b"more")
    broken.write_bytes(b"x" * broken.stat().st_size)
    staged(index, tmp_path / "node")
    config = spec(plan=ShuffledPlan(len(index), 100, seed=0), start=0, stop=15)
    same_batches(index, config, tmp_path / "node")


# --- the folder ---


def test_copies_that_someone_deletes_are_read_from_the_source(tmp_path: Path) -> None:
    index, _ = shards(tmp_path, [20, 20])
    copies = staged(index, tmp_path / "node")
    reader = Reader(index, copies)
    expected = [Reader(index).read(sample) for sample in range(40)]
    shutil.rmtree(copies.path)
    assert [reader.read(sample) for sample in range(40)] == expected
    copies.refresh()
    assert copies.missing() == [0, 1]
    check_copies(index, staged(index, tmp_path / "node"))


def test_whole_copies_are_read_at_once_and_what_they_lack_from_the_source(
    tmp_path: Path,
) -> None:
    index, _ = shards(tmp_path, [20, 20])
    copies = staged(index, tmp_path / "node")
    expected = [Reader(index).read(sample) for sample in range(40)]
    hole = copies.find(7)
    assert hole is not None
    with open(hole.path, "r+b") as file:  # as the stager leaves an image that cannot be read
        file.seek(hole.offset)
        file.write(bytes(hole.size))
    planned = Reader(index, copies).expect(np.arange(40))
    assert planned.parts is not None
    images, bad = planned.stored(slice(0, 40))
    assert [images.content(position) for position in range(40)] == expected
    assert not bad
    os.truncate(hole.path, hole.offset)
    images, bad = Reader(index, copies).expect(np.arange(40)).stored(slice(0, 40))
    assert [images.content(position) for position in range(40)] == expected
    assert Reader(index, copies).expect(np.arange(40)).parts is None  # it is no longer used


def test_two_splits_of_a_file_share_its_copy(tmp_path: Path, digits: Path) -> None:
    with tarfile.open(tmp_path / "digits.tar", "w") as tar:
        tar.add(digits, ".")
    train, val = (open_index(f"{tmp_path / 'digits.tar'}#{split}") for split in ("train", "val"))
    copies = staged(train, tmp_path / "node")
    check_copies(train, copies)
    check_copies(val, copies := Copies(val, tmp_path / "node"))
    assert copies.missing() == []


def test_merged_data_sets(tmp_path: Path, digits: Path, monkeypatch: Patch) -> None:
    for name, first in (("a", 0), ("b", 5)):
        for digit in range(first, first + 5):
            shutil.copytree(digits / "val" / str(digit), tmp_path / name / str(digit))
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        tar.add(tmp_path / "b", ".")
    places = (str(tmp_path / "a"), str(tmp_path / "b.tar"))
    index = open_merged(places, None)
    check_copies(index, staged(index, tmp_path / "node"))
    monkeypatch.chdir(tmp_path)
    assert Copies(open_merged(places, None), tmp_path / "node").missing() == []


def test_changed_data_has_other_copies(tmp_path: Path) -> None:
    index, _ = shards(tmp_path, [20, 20])
    copies = staged(index, tmp_path / "node")
    again = Copies(open_index(str(tmp_path)), tmp_path / "node")
    assert again.path == copies.path
    os.utime(tmp_path / "shard-0001.tar", (1, 1))
    changed = Copies(open_index(str(tmp_path)), tmp_path / "node")
    assert changed.path != copies.path
    assert changed.missing() == [0, 1]


def test_environment_variables_in_the_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    assert stage_folder("$SLURM_TMPDIR/data") == tmp_path / "data"
    assert stage_folder("~/data") == Path("/home/me/data")
    monkeypatch.delenv("SLURM_TMPDIR")
    with pytest.raises(
        DataError, match=r"cannot stage to \$SLURM_TMPDIR/data: SLURM_TMPDIR is not"
    ):
        stage_folder("$SLURM_TMPDIR/data")


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: Patch) -> None:
    index, _ = shards(tmp_path, [20, 20])
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file on .* cannot hold copies of data: Not a directory"):
        Copies(index, tmp_path / "file")
    staged(index, tmp_path / "node").close()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    os.chown(tmp_path / "node" / "trainyard-stage", 54321, -1)
    with pytest.raises(DataError, match="belongs to another user"):
        Copies(index, tmp_path / "node")


def test_a_link_of_another_user_in_the_place_of_the_copies(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """It leads to a folder of this user's until it is turned to one of theirs."""
    index, _ = shards(tmp_path, [20, 20])
    (tmp_path / "mine").mkdir()
    link = tmp_path / "node" / "trainyard-stage"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "mine")
    Copies(index, link.parent).close()
    os.chown(link, 54321, -1, follow_symlinks=False)
    with pytest.raises(DataError, match="belongs to another user"):
        Copies(index, link.parent)


# --- the command ---


def test_the_command_copies_all_splits_and_then_says_all_is_there(
    tmp_path: Path, digits: Path, capsys: Capture
) -> None:
    command = ("data", "stage", digits, "--to", tmp_path)
    first = json.loads(shown(capsys, *command, "--json"))
    assert {split: about["made"] for split, about in first.items()} == {"train": 3, "val": 1}
    assert first["val"]["bytes"] == int(open_index(str(digits / "val")).size.sum())
    assert shown(capsys, *command).count("all were there already") == 2
    assert json.loads(shown(capsys, *command, "--json"))["train"]["made"] == 0
    assert "ends with 0 of 3 copies" in complaint(
        capsys, "data", "stage", digits, "--to", tmp_path / "small", "--gb", "1e-6"
    )
    assert "--gb" in complaint(capsys, *command, "--gb", "0")


def test_the_command_shows_what_is_left(
    tmp_path: Path, server: Server, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    large_shards(server.folder)
    server.pause_s = 0.08
    location = f"{server.url}/shard-{{0..3}}.tar"
    assert run("data", "stage", location, "--to", tmp_path / "node") == 0
    said = capsys.readouterr()
    assert "copies 4, 4.3 MB; 4 made now" in said.out
    assert "staging data, MB: " in said.err
    assert " of 4, 0:00:0" in said.err


def test_a_run_with_staging_is_the_run_without(
    tmp_path: Path, digits: Path, finished: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    staging = ("--data.stage", "$SLURM_TMPDIR", "--data.stage_gb", "1")
    command = ("train", "debug", "--data", digits, "--run", tmp_path / "run", *SHORT, "--json")
    assert run(*command, *staging) == 0
    assert losses(tmp_path / "run") == losses(finished)
    monkeypatch.delenv("SLURM_TMPDIR")  # evaluated on another machine
    assert run("evaluate", tmp_path / "run", "--json") == 0
    assert run(*command) == 0  # data.stage says where, not what: the run goes on without


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]
