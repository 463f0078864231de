"""Copies on a node's own disk: fetched once, whole or absent, whatever dies or fills up."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.command_line import SHORT, Capture, run, shown
from tests.data.loading import all_batches, spec
from tests.data.tars import Patch, random_shards, write_shard
from tests.errors import check, raises, refused
from tests.web import FaultyServer
from trainyard.data.batch import COLUMNS, HostBatch
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.index.val_share import Side, both_sides, open_part
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.reader import Reader
from trainyard.data.reading.staging import StagedShards, _id, stage_folder
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.data.storage.manifest import Manifest, Shard, Split, write_manifest
from trainyard.data.storage.open import open_source
from trainyard.files import sole_write

pytestmark = pytest.mark.slow

GB = 10**9


@pytest.fixture(autouse=True)
def _jobs_end() -> Iterator[None]:
    yield
    while jobs:
        with jobs.pop() as process:
            process.kill()


# --- sources ---


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    with FaultyServer(tmp_path / "source") as server:
        yield server


def large_shards(folder: Path, count: int = 4, size: int = 1 << 20) -> Index:
    """The index of tars of 16 images of random bytes, of `size` bytes together."""
    generator = np.random.default_rng(1)
    for number in range(count):
        rows = [(generator.bytes(size // 16), 0) for _ in range(16)]
        write_shard(folder / f"shard-{number}.tar", rows)
    return open_index(str(folder / "*.tar"))


def large_remote(server: FaultyServer, count: int = 4, size: int = 1 << 20) -> Index:
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
from trainyard.data.reading.staging import StagedShards
from trainyard.data.index.table import load_index

staged = StagedShards(load_index(Path(sys.argv[1])), sys.argv[2])
print(json.dumps(os.getpid()), flush=True)
problem = staged.run(look_s=0.05)
print(json.dumps([problem, staged.num_made]), flush=True)
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


def is_complete(staged: StagedShards) -> bool:
    staged.refresh()
    return not staged.missing()


def stage(index: Index, folder: Path, gb: float | None = None) -> StagedShards:
    """All copies of a data set, made here."""
    staged = StagedShards(index, str(folder), gb)
    assert staged.run() is None
    return staged


def check_copies(index: Index, staged: StagedShards) -> None:
    """The copies are all there, nothing else is, and each is what the source has."""
    assert staged.missing() == []
    plain, names = Reader(index), set()
    for sample in range(len(index)):
        path = Path(staged.path_of(int(index.file[sample])))
        assert path.parent == staged.folder
        names.add(path.name)
        _, offset, size = index.locate(sample)
        assert path.read_bytes()[offset : offset + size] == plain.read(sample)
    assert {name for name in os.listdir(staged.folder) if not name.endswith(".lock")} == names


def parts(staged: StagedShards) -> list[Path]:
    """Copies in the making."""
    return list(staged.folder.glob(".*.part"))


def assert_same(batch: HostBatch, plain: HostBatch) -> None:
    for name in ("images_BHWC", *COLUMNS):
        np.testing.assert_array_equal(getattr(batch, name), getattr(plain, name))


def _with(config: LoaderSpec, folder: Path) -> LoaderSpec:
    return dataclasses.replace(config, stage=str(folder))


# --- fetched once ---


def test_ranks_that_train_over_http_fetch_each_shard_once(
    tmp_path: Path, server: FaultyServer, digits: Path
) -> None:
    digit_shards(digits, server.folder)
    index = open_index(f"{server.url}/digits-{{00..14}}.tar")
    config = spec(start=0, stop=44, size=2)
    plain = [all_batches(index, dataclasses.replace(config, rank=rank)) for rank in range(2)]
    server.requests.clear()
    ranks = [dataclasses.replace(_with(config, tmp_path), rank=rank) for rank in range(2)]
    with Loader(index, ranks[0]) as first, Loader(index, ranks[1]) as second:
        staged = StagedShards(index, str(tmp_path))
        for number, batches in enumerate(zip(first, second, strict=True)):
            for rank, batch in enumerate(batches):
                assert_same(batch, plain[rank][number])
        assert is_true_soon(lambda: is_complete(staged))
    sizes = {path.name: path.stat().st_size for path in server.folder.glob("*.tar")}
    names = [(Path(path).name, size) for path, _, size in server.requests]
    whole = [name for name, size in names if size == sizes.get(name)]
    assert sorted(whole) == sorted(sizes)
    server.requests.clear()
    for rank in range(2):  # the next job reads nothing from the source
        for expected, batch in zip(plain[rank], all_batches(index, ranks[rank]), strict=True):
            np.testing.assert_array_equal(batch.images_BHWC, expected.images_BHWC)
    assert server.requests == []


def test_training_begins_while_staging_goes_on_and_uses_what_appears(
    tmp_path: Path, server: FaultyServer, digits: Path
) -> None:
    digit_shards(digits, server.folder)
    index = open_index(f"{server.url}/digits-{{00..14}}.tar")
    server.pause_s = 0.04  # 15 shards take seconds, while images come at once
    with Loader(index, spec(start=0, stop=10**6, stage=str(tmp_path))) as loader:
        next(loader)
        staged = StagedShards(index, str(tmp_path))
        assert staged.missing()  # the first batch did not wait for the copies
        assert is_true_soon(lambda: is_complete(staged))
        for _ in range(12):  # begun before the last copy was there
            next(loader)
        server.requests.clear()
        for _ in range(40):
            next(loader)
        assert server.requests == []


# --- kills ---


def test_a_killed_process_is_followed_by_another(tmp_path: Path, server: FaultyServer) -> None:
    index = large_remote(server)
    server.pause_s = 0.5
    first, second = job(index, tmp_path / "node"), job(index, tmp_path / "node")
    staged = StagedShards(index, str(tmp_path / "node"))
    source = {path.read_bytes() for path in server.folder.glob("*.tar")}
    assert is_true_soon(lambda: bool(parts(staged)))
    first.kill()
    first.wait()
    copies = {path.read_bytes() for path in staged.folder.iterdir() if not path.suffix}
    assert copies <= source
    server.pause_s = 0
    problem, num_made = result(second)
    assert problem is None
    assert num_made >= 1
    staged.refresh()
    check_copies(index, staged)


def test_the_loader_ends_while_it_stages(tmp_path: Path, server: FaultyServer) -> None:
    index = large_remote(server)
    server.pause_s = 0.5
    plan = ShuffledPlan(len(index), 8, seed=0)
    loader = Loader(index, spec(plan=plan, start=0, stop=9, stage=str(tmp_path)))
    staged = StagedShards(index, str(tmp_path))
    assert is_true_soon(lambda: bool(parts(staged)))
    loader.close()
    assert loader._process.returncode is not None
    server.pause_s = 0
    assert staged.run() is None  # its lock is gone with it


# --- another job on the node ---


def test_a_copy_that_another_job_writes_is_left_to_it(tmp_path: Path) -> None:
    index = large_shards(tmp_path)
    staged = StagedShards(index, str(tmp_path / "node"))
    copy, content = staged.folder / _id(index, 1), (tmp_path / "shard-1.tar").read_bytes()
    with sole_write(copy) as file:
        file.write(content[:100])
        done = staged.start()
        assert is_true_soon(lambda: staged.num_made == 3)
        assert staged.missing() == [1]
        file.write(content[100:])
    assert done.result() is None
    assert staged.num_made == 3
    check_copies(index, staged)


# --- damaged sources ---


def test_a_source_that_differs_from_its_checksum_is_tried_again_then_named(
    tmp_path: Path, server: FaultyServer
) -> None:
    large_shards(server.folder)
    list_in_manifest(server.folder)
    shard = server.folder / "shard-2.tar"
    content = bytearray(shard.read_bytes())
    content[5000] ^= 1
    shard.write_bytes(content)
    index = open_index(f"{server.url}/shard-{{0..3}}.tar")
    server.requests.clear()
    staged = StagedShards(index, str(tmp_path / "node"))
    with raises("stage.wrong-checksum"):
        staged.run()
    assert server.fetched()["shard-2.tar"] == 3 * len(content)
    assert parts(staged) == []
    assert 2 in staged.missing()


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

    monkeypatch.setattr("trainyard.data.reading.staging.open_source", garbled)
    check_copies(index, stage(index, tmp_path / "node"))
    assert opened.count(str(tmp_path / "shard-1.tar")) == 3


def test_a_source_without_checksum_that_changed_since_it_was_indexed(tmp_path: Path) -> None:
    index = large_shards(tmp_path)
    with open(tmp_path / "shard-3.tar", "ab") as file:
        file.write(bytes(512))
    with raises("data.changed-since-indexed", path=f"{tmp_path}/shard-3.tar"):
        stage(index, tmp_path / "node")


def test_a_shard_that_was_packed_anew_since_it_was_indexed(tmp_path: Path) -> None:
    """Its checksum is right, and the index has offsets of the shard before."""
    index = large_shards(tmp_path)
    large_shards(tmp_path, size=1 << 19)
    list_in_manifest(tmp_path)
    with raises("data.changed-since-indexed"):
        stage(index, tmp_path / "node")


def test_a_damaged_shard_ends_training_with_one_line(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    digit_shards(digits, tmp_path)
    list_in_manifest(tmp_path)
    with open(tmp_path / "digits-07.tar", "ab") as file:
        file.write(bytes(512))
    index = open_index(str(tmp_path / "*.tar"))
    config = spec(start=0, stop=10**6, stage=str(tmp_path / "node"))
    bad = tmp_path / "digits-07.tar"
    with Loader(index, config) as loader, raises("stage.wrong-checksum", path=bad):
        for _ in loader:
            pass
    assert capfd.readouterr().err == ""


def test_a_shard_that_is_gone_is_left_to_the_source_and_the_others_are_staged(
    tmp_path: Path,
) -> None:
    index = large_shards(tmp_path)
    (tmp_path / "shard-1.tar").unlink()
    staged = StagedShards(index, str(tmp_path / "node"))
    problem = staged.run()
    assert staged.missing() == [1]
    assert problem is not None
    assert "3 of 4" in problem and "shard-1.tar" in problem


# --- room ---


def mean_size(index: Index) -> float:
    """Mean bytes of a shard."""
    return float(np.mean([os.path.getsize(f"{index.root}/{name}") for name in index.file_names]))


def test_two_data_sets_fill_a_folder_to_the_cap(tmp_path: Path) -> None:
    first, second = (large_shards(tmp_path / f"data-{n}", size=100_000) for n in range(2))
    node, gb = tmp_path / "node", 6.5 * mean_size(first) / GB
    check_copies(first, stage(first, node, gb))
    staged = StagedShards(second, str(node), gb)
    assert "of data.stage_gb are used" in str(staged.run())
    assert len(staged.missing()) == 2  # as many as fit
    assert StagedShards(first, str(node), gb).missing() == []  # nothing is evicted
    reader = Reader(second, staged)
    assert [reader.read(n) for n in range(64)] == [Reader(second).read(n) for n in range(64)]


@pytest.mark.parametrize(("size", "reserve"), [(10, 1), (300, 3), (30_000, 50)])  # GB
def test_a_disk_that_is_full_for_others_too(
    tmp_path: Path, monkeypatch: Patch, size: int, reserve: int
) -> None:
    """The reserve stays free."""
    index = large_shards(tmp_path, size=100_000)
    staged = StagedShards(index, str(tmp_path / "node"))
    room = reserve * GB + int(2.5 * mean_size(index))

    def usage(folder: Path) -> Any:
        used = sum(path.stat().st_size for path in folder.iterdir())
        return shutil._ntuple_diskusage(size * GB, size * GB - room + used, room - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert "no room for" in str(staged.run())
    assert len(staged.missing()) == 2
    assert usage(staged.folder).free >= reserve * GB


def test_a_copy_of_another_process_that_vanishes_ends_nothing(tmp_path: Path) -> None:
    index = large_shards(tmp_path, size=100_000)
    staged = StagedShards(index, str(tmp_path / "node"))
    (staged.folder / ".x.part").symlink_to("gone")  # listed, and without a size
    assert staged.run() is None


def test_a_disk_that_fills_up_while_a_copy_is_made(tmp_path: Path, monkeypatch: Patch) -> None:
    index = large_shards(tmp_path, size=100_000)
    staged = StagedShards(index, str(tmp_path / "node"))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left on device" in str(staged.run())
    assert parts(staged) == []
    assert len(staged.missing()) == 4
    assert staged.run() is None


def printed(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return capfd.readouterr().err.splitlines()


def until_printed(capfd: pytest.CaptureFixture[str]) -> list[str]:
    end = time.monotonic() + 20
    while not (lines := printed(capfd)) and time.monotonic() < end:
        time.sleep(0.005)
    return lines


def test_training_goes_on_without_room_and_says_so_once(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks of a node are at work; one reports."""
    digit_shards(digits, tmp_path)
    index = open_index(str(tmp_path / "*.tar"))
    config = spec(start=0, stop=5, size=2, stage_gb=1e-6)
    plain = [all_batches(index, dataclasses.replace(config, rank=rank)) for rank in range(2)]
    ranks = [dataclasses.replace(config, rank=n, stage=str(tmp_path / "node")) for n in range(2)]
    with Loader(index, ranks[0]) as first, Loader(index, ranks[1]) as second:
        for number, batches in enumerate(zip(first, second, strict=True)):
            for rank, batch in enumerate(batches):
                assert_same(batch, plain[rank][number])
        lines = until_printed(capfd)
    [found] = [*lines, *printed(capfd)]
    assert found.startswith(f"trainyard: staging to {tmp_path / 'node' / 'trainyard-stage'} on ")
    assert "0 of 15" in found


# --- folders of images ---


def test_single_images_are_read_at_the_source_with_one_line(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    index, config = open_index(str(digits / "train")), spec()
    plain, staging = (all_batches(index, each) for each in (config, _with(config, tmp_path)))
    for one, other in zip(plain, staging, strict=True):
        assert_same(one, other)
        assert one.bad == other.bad
    [line] = capfd.readouterr().err.splitlines()
    assert "single images are not staged: `data pack` makes shards" in line


@pytest.mark.quick
@pytest.mark.parametrize("part", [0.3, "1/2"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_no_image_is_copied_of_one_side_of_a_folder(
    tmp_path: Path, digits: Path, split: Literal["train", "val"], part: float | str
) -> None:
    side = open_part(open_index(str(digits / "val")), Side(split, part, 0))
    staged = StagedShards(side, str(tmp_path / "node"))
    assert staged.missing() == []
    assert "single images are not staged" in str(staged.run())


@pytest.mark.quick
def test_shards_without_a_sample_of_one_side_are_not_copied(tmp_path: Path) -> None:
    for number in range(12):
        write_shard(tmp_path / f"{number:02d}.tar", [(b"image", 0), (b"image", 1)])
    whole = open_index(str(tmp_path / "*.tar"))
    for side in both_sides(0.1, 0):
        part = open_part(whole, side)
        staged = stage(part, tmp_path / side.split)
        own = {part.file_names[file] for file in part.file.tolist()}
        assert staged.num_made == len(own)
        plain, reader = Reader(part), Reader(part, staged)
        samples = range(len(part))
        assert [*map(reader.read, samples)] == [*map(plain.read, samples)]
    assert len(own) < 12


# --- the folder ---


@pytest.mark.parametrize("harm", ["none", "cut short", "deleted"])
def test_copies_that_someone_harms_are_read_from_the_source(tmp_path: Path, harm: str) -> None:
    index, expected = random_shards(tmp_path, [20, 20])
    staged = stage(index, tmp_path / "node")
    reader = Reader(index, staged)
    if harm == "cut short":
        os.truncate(staged.path_of(0), 5000)
    elif harm == "deleted":
        shutil.rmtree(staged.folder)
    ((_, images, bad),) = reader.prefetch(np.arange(40)).read(slice(0, 40))
    assert [images.content(position) for position in range(40)] == expected
    assert not bad
    assert [reader.read(sample) for sample in range(40)] == expected
    assert staged.has(0) is (harm == "none")  # else it is no longer used
    if harm != "cut short":
        check_copies(index, stage(index, tmp_path / "node"))


def test_two_splits_of_a_file_share_its_copy(tmp_path: Path, digits: Path) -> None:
    with tarfile.open(tmp_path / "digits.tar", "w") as tar:
        tar.add(digits, ".")
    train, val = (open_index(f"{tmp_path / 'digits.tar'}#{split}") for split in ("train", "val"))
    check_copies(train, stage(train, tmp_path / "node"))
    check_copies(val, StagedShards(val, str(tmp_path / "node")))


def test_merged_data_sets(tmp_path: Path, digits: Path, monkeypatch: Patch) -> None:
    """Of a folder and a tar, the tar alone is copied."""
    for name, first in (("a", 0), ("b", 5)):
        for digit in range(first, first + 5):
            shutil.copytree(digits / "val" / str(digit), tmp_path / name / str(digit))
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        tar.add(tmp_path / "b", ".")
    locations = (str(tmp_path / "a"), str(tmp_path / "b.tar"))
    index = open_merged(locations, None)
    staged = stage(index, tmp_path / "node")
    assert len(staged) == 1
    reader = Reader(index, staged)
    ((_, images, bad),) = reader.prefetch(np.arange(len(index))).read(slice(0, len(index)))
    plain = Reader(index)
    assert [images.content(row) for row in range(len(index))] == [
        plain.read(row) for row in range(len(index))
    ]
    assert not bad
    monkeypatch.chdir(tmp_path)
    assert StagedShards(open_merged(locations, None), str(tmp_path / "node")).missing() == []


def test_changed_data_has_other_copies(tmp_path: Path) -> None:
    index, _ = random_shards(tmp_path, [20, 20])
    staged = stage(index, tmp_path / "node")
    again = StagedShards(open_index(str(tmp_path)), str(tmp_path / "node"))
    assert again.missing() == []
    os.utime(tmp_path / "shard-0001.tar", (1, 1))
    changed = StagedShards(open_index(str(tmp_path)), str(tmp_path / "node"))
    assert changed.missing() == [1]
    assert changed.path_of(0) == staged.path_of(0)


def test_a_shard_that_is_replaced_by_one_of_its_size_and_time_has_another_copy(
    tmp_path: Path,
) -> None:
    for labels in ([0, 0, 1], [0, 1, 1]):
        write_shard(tmp_path / "0.tar", [(bytes([label]), label) for label in labels])
        os.utime(tmp_path / "0.tar", (1, 1))
        index = open_index(str(tmp_path / "0.tar"))
        reader = Reader(index, stage(index, tmp_path / "node"))
        assert [*b"".join(map(reader.read, range(3)))] == index.label.tolist() == labels


def test_environment_variables_in_the_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    assert stage_folder("$SLURM_TMPDIR/data") == tmp_path / "data"
    assert stage_folder("~/data") == Path("/home/me/data")
    monkeypatch.delenv("SLURM_TMPDIR")
    with raises("stage.folder-not-set", value="$SLURM_TMPDIR/data"):
        stage_folder("$SLURM_TMPDIR/data")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="for root alone")


@needs_root
def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: Patch) -> None:
    index, _ = random_shards(tmp_path, [20, 20])
    (tmp_path / "file").touch()
    with raises("stage.unwritable", path=f"{tmp_path}/file/trainyard-stage"):
        StagedShards(index, str(tmp_path / "file"))
    stage(index, tmp_path / "node")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    os.chown(tmp_path / "node" / "trainyard-stage", 54321, -1)
    with raises("stage.foreign-folder", path=f"{tmp_path}/node/trainyard-stage"):
        StagedShards(index, str(tmp_path / "node"))


@needs_root
def test_a_link_of_another_user_in_the_place_of_the_copies(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """It leads to a folder of this user's until it is turned to one of theirs."""
    index, _ = random_shards(tmp_path, [20, 20])
    (tmp_path / "mine").mkdir()
    link = tmp_path / "node" / "trainyard-stage"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "mine")
    StagedShards(index, str(link.parent))
    os.chown(link, 54321, -1, follow_symlinks=False)
    with raises("stage.foreign-folder", path=link):
        StagedShards(index, str(link.parent))


# --- the command ---


def test_the_command_copies_all_splits_and_then_says_all_is_there(
    tmp_path: Path, digits: Path, capsys: Capture
) -> None:
    packed = tmp_path / "packed"
    run("data", "pack", digits, packed, "--format", "webdataset", "--shard-samples", 200)
    command = ("data", "stage", packed, "--to", tmp_path / "node")
    capsys.readouterr()
    first = json.loads(shown(capsys, *command, "--json"))
    shards = {split: list(packed.glob(f"imagenet-{split}-*")) for split in first}
    for split, about in first.items():
        assert about["made"] == about["copies"] == len(shards[split])
        assert about["bytes"] == sum(path.stat().st_size for path in shards[split])
    assert shown(capsys, *command).count("all were there already") == 2
    assert json.loads(shown(capsys, *command, "--json"))["train"]["made"] == 0
    small = (*command[:-1], tmp_path / "small")
    check(refused(*small, "--gb", "1e-6"), "stage.incomplete")
    check(refused(*command, "--gb", "0"), "option.invalid")
    folder = ("data", "stage", digits, "--to", tmp_path / "node")
    check(refused(*folder), "stage.incomplete")


@pytest.mark.night
def test_the_command_shows_what_is_left(
    tmp_path: Path, server: FaultyServer, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")  # a dumb one shows no progress
    large_shards(server.folder)
    server.pause_s = 0.05  # 3 s in all: shorter work shows nothing
    location = f"{server.url}/shard-{{0..3}}.tar"
    assert run("data", "stage", location, "--to", tmp_path / "node") == 0
    said = capsys.readouterr()
    assert "copies 4" in said.out
    assert " of 4 " in said.err


@pytest.mark.quick
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
