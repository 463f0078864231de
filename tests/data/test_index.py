import dataclasses
import errno
import mmap
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_line import Capture
from tests.data.tars import Patch, stored, write_files, write_shard
from tests.errors import raises
from tests.web import FaultyServer
from trainyard import files
from trainyard.data import formats
from trainyard.data.formats.scan import Scan
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.stamps import is_stale
from trainyard.data.index.table import Index, load_index
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.manifest import Manifest, Shard, Split, write_manifest

LONG_AGO = 1_000_000_000  # seconds since 1970


@pytest.fixture
def scans(monkeypatch: Patch) -> list[str]:
    """The locations scanned so far: an index that is not rebuilt adds none."""
    seen: list[str] = []
    real_scan = formats.scan

    def scan(place: ResolvedLocation) -> Scan:
        seen.append(place.location)
        return real_scan(place)

    monkeypatch.setattr(formats, "scan", scan)
    return seen


@pytest.fixture
def read_only(monkeypatch: Patch) -> Callable[[Path], None]:
    """Makes writing an index into a folder fail; permissions would not stop root."""

    def protect(folder: Path) -> None:
        def atomic_write(path: Path, size: int) -> Any:
            if path.is_relative_to(folder):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return files.atomic_write(path, size)

        monkeypatch.setattr("trainyard.data.index.table.atomic_write", atomic_write)

    return protect


def write_image(path: Path, content: str = "an image") -> None:
    write_files(path.parent, {path.name: content.encode()})


def write_labels(path: Path, labels: list[int]) -> None:
    write_shard(path, [(b"image", label) for label in labels])


def age(folder: Path) -> None:
    """Clocks of file systems are coarse: what is written from here on is newer for certain."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "folder"
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/deep/3.png", "épagneul/été.jpg"):
        write_image(data / name, f"the image {name}")
    age(data)
    return data


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    data = tmp_path / "shards"
    for number in range(3):
        write_labels(data / f"train-{number}.tar", [number, 4])
    age(data)
    return data


def file_names(table: Index) -> list[str]:
    return [*table.file_names]


def assert_same_table(one: Index, other: Index) -> None:
    assert one.fingerprint == other.fingerprint
    assert (one.format, one.classes) == (other.format, other.classes)
    assert one.has_names == other.has_names
    for column in ("file", "offset", "size", "label"):
        assert np.array_equal(getattr(one, column), getattr(other, column))
    assert file_names(one) == file_names(other)


# --- what an index holds ---


def contents(table: Index) -> list[bytes]:
    return [content for _, content in stored(table)]


def test_the_index_of_a_folder(folder: Path) -> None:
    write_image(folder / "épagneul" / os.fsdecode(b"\xff.jpg"), "no UTF-8")
    table = open_index(str(folder))
    assert (len(table), table.format, table.root) == (5, "folder", str(folder))
    assert (table.classes, table.has_names) == (("cat", "dog", "épagneul"), True)
    assert table.label.tolist() == [0, 0, 1, 2, 2]
    assert table.file.tolist() == [0, 1, 2, 3, 4]
    names = ["cat/1.jpg", "cat/2.jpg", "dog/deep/3.png", "épagneul/été.jpg"]
    assert file_names(table)[:4] == names
    assert contents(table) == [*(f"the image {name}".encode() for name in names), b"no UTF-8"]
    types = [column.dtype for column in (table.file, table.offset, table.size, table.label)]
    assert types == [np.int32, np.int64, np.int64, np.int32]


def test_the_index_of_shards(shards: Path) -> None:
    told: list[tuple[object, ...]] = []
    table = open_index(str(shards), lambda *count: told.append(count))
    assert told == [(2, (1, 3)), (4, (2, 3)), (6, (3, 3))]
    assert (len(table), table.format, table.root) == (6, "webdataset", str(shards))
    assert (table.classes, table.has_names) == (("0", "1", "2", "3", "4"), False)
    assert table.label.tolist() == [0, 4, 1, 4, 2, 4]
    assert table.file.tolist() == [0, 0, 1, 1, 2, 2]
    assert file_names(table) == ["train-0.tar", "train-1.tar", "train-2.tar"]
    assert contents(table) == [b"image"] * 6


# --- saved and opened again ---


def test_an_index_of_shards_lies_beside_them_and_is_hidden(shards: Path, cache: Path) -> None:
    table = open_index(str(shards))
    assert table.path.parent == shards
    assert [path.name for path in shards.iterdir() if path.name.startswith(".")] == [
        table.path.name
    ]
    assert not cache.exists()


def test_single_images_keep_their_folders_to_themselves(folder: Path, cache: Path) -> None:
    """torchvision's Caltech101 takes each name among the class folders for a class."""
    (folder / "list.csv").write_text("path,label\ncat/1.jpg,cat\ncat/2.jpg,dog\n")
    before = sorted(folder.rglob("*"))
    for location in (folder, folder / "list.csv"):
        assert open_index(str(location)).path.parent == cache
    assert sorted(folder.rglob("*")) == before


def test_an_index_among_class_folders_that_is_asked_for_stays_there(folder: Path) -> None:
    table = build_index(str(folder), beside=True)
    assert table.path.parent == folder
    write_image(folder / "cat/3.jpg")
    renewed = open_index(str(folder))
    assert (renewed.path, len(renewed)) == (table.path, 5)


def test_options_and_splits_are_checked_though_an_index_is_saved(folder: Path) -> None:
    build_index(str(folder), beside=True)
    with raises("data.unknown-option", name="#nosuch="):
        open_index(f"{folder}#nosuch=1")
    with raises("data.no-splits", split="val"):
        open_index(f"{folder}#val")


def test_an_unchanged_data_set_is_not_scanned_again(
    folder: Path, shards: Path, scans: list[str]
) -> None:
    """Parts of one folder have indexes of their own."""
    parts = {"": 6, "/*.tar": 6, "/train-{0..1}.tar": 4, "/train-0.tar": 2}
    sizes = {str(folder): 4} | {f"{shards}{part}": size for part, size in parts.items()}
    for _ in range(3):
        assert {location: len(open_index(location)) for location in sizes} == sizes
    assert scans == list(sizes)


def test_one_location_has_one_index_however_it_is_written(
    shards: Path, monkeypatch: Patch, scans: list[str]
) -> None:
    monkeypatch.chdir(shards.parent)
    for location in ("shards", "shards/", "./shards", str(shards)):
        assert contents(open_index(location)) == [b"image"] * 6
    for location in ("shards/*.tar", f"{shards}/*.tar"):
        assert contents(open_index(location)) == [b"image"] * 6
    assert scans == ["shards", "shards/*.tar"]


# --- read-only data ---


def test_the_index_of_read_only_data_lies_in_the_cache(
    folder: Path, cache: Path, scans: list[str], read_only: Callable[[Path], None]
) -> None:
    read_only(folder)
    built, opened = open_index(str(folder)), open_index(str(folder))
    assert built.path.parent == opened.path.parent == cache
    assert opened.root == str(folder)
    assert len(contents(opened)) == 4
    assert scans == [str(folder)]
    write_image(folder / "cat/0.jpg")
    assert len(open_index(str(folder))) == 5


def test_data_sets_do_not_mix_in_the_cache(
    tmp_path: Path, folder: Path, read_only: Callable[[Path], None]
) -> None:
    read_only(tmp_path / "other")
    write_image(tmp_path / "other/one/folder/cat/1.jpg", "one")
    write_image(tmp_path / "other/two/folder/cat/1.jpg", "two")
    link = tmp_path / "other/link"
    for name in ("one", "two") * 2:
        link.unlink(missing_ok=True)
        link.symlink_to(f"{name}/folder")
        assert contents(open_index(f"{tmp_path}/other/{name}/folder")) == [name.encode()]
        assert contents(open_index(str(link))) == [name.encode()]


def test_nowhere_to_write_is_an_error_that_says_what_to_do(
    tmp_path: Path, folder: Path, read_only: Callable[[Path], None]
) -> None:
    read_only(tmp_path.parent)
    with raises("index.unwritable", location=folder, reason="Read-only file system"):
        open_index(str(folder))


# --- changed data ---


CHANGES_TO_A_FOLDER: dict[str, Callable[[Path], object]] = {
    "another image": lambda data: write_image(data / "cat/0.jpg"),
    "a nested image": lambda data: write_image(data / "dog/deep/0.jpg"),
    "a nested folder": lambda data: write_image(data / "dog/deep/er/0.jpg"),
    "an image less": lambda data: (data / "cat/2.jpg").unlink(),
    "an image renamed": lambda data: (data / "cat/2.jpg").rename(data / "cat/3.jpg"),
    "another class": lambda data: write_image(data / "bird/1.jpg"),
    "a class renamed": lambda data: (data / "cat").rename(data / "lynx"),
    "a class less": lambda data: shutil.rmtree(data / "cat"),
}


@pytest.mark.parametrize("change", CHANGES_TO_A_FOLDER)
def test_a_changed_folder_gets_a_fresh_index(folder: Path, scans: list[str], change: str) -> None:
    before = open_index(str(folder)).fingerprint
    CHANGES_TO_A_FOLDER[change](folder)
    after = open_index(str(folder))
    assert after.fingerprint != before
    images = sorted(path for path in folder.rglob("*") if path.suffix in (".jpg", ".png"))
    assert sorted(Path(after.locate(sample)[0]) for sample in range(len(after))) == images
    assert after.classes == tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    open_index(str(folder))
    assert len(scans) == 2  # the fresh one was saved


def save_again(path: Path, content: bytes) -> None:
    """Writes a file in place, some time later: the time of its folder stays."""
    before = path.parent.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, (LONG_AGO + 60, LONG_AGO + 60))
    assert path.parent.stat().st_mtime_ns == before


@pytest.mark.parametrize("place", ["", "dogs.csv", "dogs.csv#train"])
@pytest.mark.parametrize("image", ["cat/1.jpg", "dog/deep/3.png"])
def test_an_image_that_is_saved_again_in_place_is_indexed_again(
    folder: Path, scans: list[str], place: str, image: str
) -> None:
    """The sizes of images are in the index, and their folders do not change."""
    head, end = ("path,label,split", ",train") if "#" in place else ("path,label", "")
    write_image(folder / "dogs.csv", f"{head}\ncat/1.jpg,cat{end}\ndog/deep/3.png,dog{end}\n")
    location, changed = str(folder / place), folder / image
    before = open_index(location)
    save_again(changed, b"another size")
    after = open_index(location)
    assert after.fingerprint != before.fingerprint
    assert b"another size" in contents(after)
    os.utime(changed)
    assert open_index(location).stamps != after.stamps
    assert open_index(location).fingerprint == after.fingerprint
    assert len(scans) == 3  # at first, for the size and for the time


def test_on_a_slow_file_server_some_of_the_images_are_looked_at(tmp_path: Path) -> None:
    """So a start on fourteen million images does not wait for as many answers of it."""
    # Two parts: the even ones, and the odd ones.
    data = tmp_path / "data"
    write_files(data, {f"cat/{number:04d}.jpg": b"an image" for number in range(4096)})
    age(data)
    index = open_index(str(data))
    save_again(data / "cat/0003.jpg", b"another size")
    assert not is_stale(index, patience_s=-1)
    assert is_stale(index)
    save_again(data / "cat/0002.jpg", b"another size")
    assert is_stale(index, patience_s=-1)


@pytest.mark.parametrize("above", [False, True])
def test_classes_that_a_manifest_names_otherwise_now(shards: Path, above: bool) -> None:
    """An index of shards has the names from dataset.json, which a glob does not hold."""
    location = f"{shards}/train-{{0..2}}.tar"
    names = [f"{'shards/' * above}train-{number}.tar" for number in range(3)]
    assert not open_index(location).has_names
    for classes in ("abcde", "edcba"):
        folder = shards.parent if above else shards
        listed = tuple(Shard(name, 2, (folder / name).stat().st_size, "") for name in names)
        manifest = Manifest("webdataset", tuple(classes), {"train": Split("*.tar", listed)})
        write_manifest(folder, manifest)
        assert open_index(location).classes == tuple(classes)


@pytest.mark.parametrize("labels", [[0, 0, 1, 1], [0] * 40], ids=["samples", "bytes"])
@pytest.mark.parametrize("above", [False, True])
def test_a_manifest_that_describes_another_shard_names_no_classes(
    tmp_path: Path, labels: list[int], above: bool
) -> None:
    """Of another program, in which 0 is a dog. Tars of few samples have one size."""
    shard = tmp_path / "data" / "0.tar"
    write_labels(shard, labels)
    name, size = "data/0.tar" if above else "0.tar", shard.stat().st_size
    for samples, num_bytes in ((3, size), (len(labels), size + 1)):
        split = Split(name, (Shard(name, samples, num_bytes, ""),))
        manifest = Manifest("webdataset", ("cat", "dog"), {"train": split})
        write_manifest(tmp_path if above else shard.parent, manifest)
        with raises("manifest.other-shard", path=shard, samples=len(labels), bytes=size):
            open_index(str(shard))
        with FaultyServer(tmp_path) as server, raises("manifest.other-shard", bytes=size):
            open_index(f"{server.url}/data/0.tar")


def test_a_manifest_above_a_relative_location(shards: Path, monkeypatch: Patch) -> None:
    size = (shards / "train-0.tar").stat().st_size
    listed = tuple(Shard(f"shards/train-{number}.tar", 2, size, "") for number in range(3))
    split = Split("shards/*.tar", listed)
    write_manifest(shards.parent, Manifest("webdataset", tuple("abcde"), {"train": split}))
    monkeypatch.chdir(shards.parent)
    assert build_index(shards.name).classes == build_index(str(shards)).classes == tuple("abcde")


CHANGES_TO_SHARDS: dict[str, Callable[[Path], object]] = {
    "rewritten": lambda data: write_labels(data / "train-1.tar", [3, 3, 3]),
    "rewritten in its old size": lambda data: write_labels(data / "train-1.tar", [9, 9]),
    "another": lambda data: write_labels(data / "train-7.tar", [3]),
    "one less": lambda data: (data / "train-0.tar").unlink(),
}


@pytest.mark.parametrize("pattern", ["", "/*.tar", "/train-?.tar"])
@pytest.mark.parametrize("change", CHANGES_TO_SHARDS)
def test_changed_shards_get_a_fresh_index(
    shards: Path, scans: list[str], pattern: str, change: str
) -> None:
    location = f"{shards}{pattern}"
    before = open_index(location).fingerprint
    CHANGES_TO_SHARDS[change](shards)
    after = open_index(location)
    assert after.fingerprint != before
    assert_same_table(after, build_index(location))
    open_index(location)
    assert len(scans) == 3  # at first, after the change, and the one to compare with


def test_a_shard_added_to_one_of_the_folders_of_a_glob(tmp_path: Path) -> None:
    for name in ("a/1.tar", "b/deep/1.tar", "c/deep/1.tar", "c/1.tar"):
        write_labels(tmp_path / "data" / name, [0])
    age(tmp_path / "data")
    flat, deep = f"{tmp_path}/data/*/*.tar", f"{tmp_path}/data/*/*/*.tar"
    assert (len(open_index(flat)), len(open_index(deep))) == (2, 2)
    write_labels(tmp_path / "data/a/2.tar", [0])
    write_labels(tmp_path / "data/b/new/1.tar", [0])
    assert (len(open_index(flat)), len(open_index(deep))) == (3, 3)


def test_a_brace_list_does_not_care_what_else_its_folder_gains(
    shards: Path, scans: list[str]
) -> None:
    for location in (f"{shards}/train-{{0..1}}.tar", f"{shards}/train-0.tar"):
        open_index(location)
        write_labels(shards / "train-2.tar", [5])
        write_labels(shards / "train-3.tar", [5])
        open_index(location)
    assert len(scans) == 2


# --- other content with the old size and time ---

TIMES = {"set by a tar": LONG_AGO * 10**9, "of a clock": LONG_AGO * 10**9 + 123_456_789}  # ns


def write_list(path: Path, labels: str) -> None:
    rows = (f"{number}.jpg,{label}\n" for number, label in enumerate(labels))
    write_files(path.parent, {path.name: ("path,label\n" + "".join(rows)).encode()})


def name_classes(folder: Path, classes: str) -> None:
    split = Split("0.tar", (Shard("0.tar", 3, (folder / "0.tar").stat().st_size, ""),))
    write_manifest(folder, Manifest("webdataset", tuple(classes), {"train": split}))


def write_large(path: Path, labels: str) -> None:
    write_shard(path, [(bytes(1 << 20), int(label)) for label in labels])


REPLACED: dict[str, tuple[str, Callable[[Path, str], object], str, str]] = {
    "a list": ("list.csv", write_list, "aab", "abb"),
    "a shard": (
        "0.tar",
        lambda path, labels: write_labels(path, [*map(int, labels)]),
        "001",
        "011",
    ),
    "a large shard": ("0.tar", write_large, "001", "011"),
    "a manifest": (
        "dataset.json",
        lambda path, names: name_classes(path.parent, names),
        "ab",
        "ba",
    ),
}


def set_times(folder: Path, when: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, ns=(when, when))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("what", "when"),
    # No clock gives another content of a large shard the same nanosecond.
    [pair for pair in product(REPLACED, TIMES) if pair != ("a large shard", "of a clock")],
)
def test_a_file_that_is_replaced_by_one_of_its_size_and_time(
    tmp_path: Path, what: str, when: str, in_place: bool
) -> None:
    name, write, before, after = REPLACED[what]
    write_files(tmp_path, [f"{number}.jpg" for number in range(3)])
    write_labels(tmp_path / "0.tar", [0, 0, 1])
    path = tmp_path / name
    write(path, before)
    set_times(tmp_path, TIMES[when])
    location = str(path if what == "a list" else tmp_path / "0.tar")
    old, size = open_index(location), path.stat().st_size
    if not in_place:
        path.unlink()
    write(path, after)
    set_times(tmp_path, TIMES[when])
    assert path.stat().st_size == size
    new = open_index(location)
    assert new.classes != old.classes or new.label.tolist() == [0, 1, 1]
    assert_same_table(new, build_index(location))


@pytest.mark.parametrize("when", TIMES)
def test_a_folder_that_gains_an_image_and_has_its_time_again(folder: Path, when: str) -> None:
    set_times(folder, TIMES[when])
    assert len(open_index(str(folder))) == 4
    write_image(folder / "cat/0.jpg")
    set_times(folder, TIMES[when])
    assert len(open_index(str(folder))) == 5


@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("data", ["folder", "list", "shard", "large shard"])
def test_data_that_moved_with_their_index_are_not_indexed_anew(
    tmp_path: Path, scans: list[str], data: str, when: str
) -> None:
    """By `cp -a` or rsync. Of large shards with a time that was set, labels may have changed."""
    here, there = tmp_path / "here", tmp_path / "there"
    name = {"folder": "", "list": "list.csv"}.get(data, "0.tar")
    if data == "folder":
        write_files(here, ["cat/0.jpg", "dog/0.jpg"])
    elif data == "list":
        write_files(here, ["0.jpg", "1.jpg"])
        write_list(here / name, "ab")
    else:
        (write_large if "large" in data else REPLACED["a shard"][1])(here / name, "01")
    set_times(here, TIMES[when])
    table = build_index(str(here / name), beside=True)
    shutil.copytree(here, there)
    moved = open_index(str(there / name))
    assert_same_table(moved, table)
    assert moved.root == str(there) and contents(moved) == contents(table)
    is_read_anew = (data, when) == ("large shard", "set by a tar")
    assert len(scans) == 1 + is_read_anew
    os.chmod(there / name, 0o755)
    open_index(str(there / name))
    assert len(scans) == 1 + 2 * is_read_anew
    open_index(str(there / name))
    assert len(scans) == 1 + 2 * is_read_anew


@pytest.mark.parametrize("when", TIMES)
def test_an_index_of_an_earlier_release_has_time_and_size_alone(
    shards: Path, scans: list[str], when: str
) -> None:
    set_times(shards, TIMES[when])
    index = open_index(str(shards / "*.tar"))
    stamps = {name: stamp and stamp[:2] for name, stamp in index.stamps.items()}
    assert is_stale(dataclasses.replace(index, stamps=stamps)) == (when == "set by a tar")
    damaged = {name: stamp and [*stamp[:2], 3, 4] for name, stamp in index.stamps.items()}
    assert is_stale(dataclasses.replace(index, stamps=damaged))


# --- broken index files ---


def test_a_broken_index_is_rebuilt(folder: Path, scans: list[str]) -> None:
    """One that is cut short anywhere, and a foreign file in its place."""
    table = open_index(str(folder))
    content = table.path.read_bytes()
    lengths = [0, 1, 7, 8, 9, 15, 16, 17, 100, len(content) // 2, len(content) - 1]
    foreign = (b"TYINDEX4", b"PK\x03\x04", b"\0" * 16, b"{}\n")
    broken = [content[:n] for n in lengths] + [head + content[len(head) :] for head in foreign]
    for damaged in broken:
        table.path.unlink()  # a new file: the old one may be mapped still
        table.path.write_bytes(damaged)
        assert load_index(table.path) is None
        assert_same_table(open_index(str(folder)), table)
        assert table.path.read_bytes() == content
    assert len(scans) == 1 + len(broken)
    assert load_index(folder / "absent") is load_index(folder) is None


def test_a_failed_write_leaves_no_file_behind(
    folder: Path, monkeypatch: Patch, cache: Path
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with raises("index.unwritable", location=folder):
        open_index(str(folder))
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert list(cache.iterdir()) == []


# --- on a server ---


def test_an_index_that_a_server_holds_beside_its_data_is_not_taken(tmp_path: Path) -> None:
    """It may be that of earlier shards of the same sizes, with other labels."""
    with FaultyServer(tmp_path / "source") as server:
        write_labels(server.folder / "0.tar", [0, 1, 2, 3])
        open_index(f"{server.folder}/0.tar")
        write_labels(server.folder / "0.tar", [3, 2, 1, 0])
        assert open_index(f"{server.url}/0.tar").label.tolist() == [3, 2, 1, 0]


def test_a_server_that_does_not_tell_versions_apart_is_named(
    tmp_path: Path, capsys: Capture
) -> None:
    """At each opening: a start of a run reads the saved index."""
    with FaultyServer(tmp_path / "source") as server:
        server.has_tags = False
        write_labels(server.folder / "0.tar", [0, 1])
        for _ in range(2):
            open_index(f"{server.url}/0.tar")
    said = capsys.readouterr().err
    assert said.count("sends neither ETag nor Last-Modified: a change that keeps the size") == 2


def test_files_of_the_first_of_january_1970_are_no_servers(tmp_path: Path, capsys: Capture) -> None:
    """An image of a container has such times."""
    write_labels(tmp_path / "0.tar", [0, 1])
    os.utime(tmp_path / "0.tar", (0, 0))
    for _ in range(2):
        open_index(f"{tmp_path}/0.tar")
    assert capsys.readouterr().err == ""


# --- fingerprints ---


def test_a_fingerprint_does_not_depend_on_names_and_places(
    tmp_path: Path, folder: Path, shards: Path
) -> None:
    for data, names in ((folder, [""]), (shards, ["", "/*.tar", "/train-{0..2}.tar"])):
        copied = shutil.copytree(data, tmp_path / "other/place" / data.name)
        places = [f"{place}{name}" for place in (data, copied) for name in names]
        assert len({open_index(place).fingerprint for place in places}) == 1


def test_any_change_of_the_data_changes_the_fingerprint(tmp_path: Path) -> None:
    def fingerprint(images: dict[str, str]) -> str:
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        for name, content in images.items():
            write_image(tmp_path / "data" / name, content)
        return build_index(f"{tmp_path}/data").fingerprint

    fingerprints = [
        fingerprint({"a/1.jpg": "one", "b/2.jpg": "two"}),
        fingerprint({"a/1.jpg": "one!", "b/2.jpg": "two"}),  # size
        fingerprint({"a/1.jpg": "one", "b/3.jpg": "two"}),  # name
        fingerprint({"a/1.jpg": "one", "a/2.jpg": "two"}),  # label
        fingerprint({"a/1.jpg": "one", "c/2.jpg": "two"}),  # class name
        fingerprint({"a/1.jpg": "one", "b/2.jpg": "two", "b/3.jpg": "two"}),
    ]
    for labels in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 2, 2]):
        write_labels(tmp_path / "0.tar", labels)
        fingerprints.append(build_index(f"{tmp_path}/0.tar").fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)


def test_columns_are_views_of_one_mapped_file(shards: Path) -> None:
    """14 million rows are read by all ranks, and copied by none."""
    table = open_index(str(shards))
    columns: list[np.ndarray[Any, Any]] = [table.file, table.offset, table.size, table.label]
    columns += [table.file_names.text, table.file_names.ends]
    holders = {id(memory(column)): memory(column) for column in columns}
    assert [type(holder) for holder in holders.values()] == [mmap.mmap]
    assert not any(column.flags.writeable for column in columns)


def memory(column: np.ndarray[Any, Any]) -> object:
    """What holds the bytes that a column is a view of."""
    base: object = column
    while isinstance(base, np.ndarray):
        base = base.base
    return base
