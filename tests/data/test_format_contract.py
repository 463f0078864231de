"""The promises of every format; the promises of one format are tested in its own file."""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.data.tars import open_splits, read_rows, stored, write_files, write_tar
from tests.data.tfrecords import write_samples
from tests.errors import raises
from trainyard.data.formats import all_formats
from trainyard.data.formats.scan import EncodedSample
from trainyard.data.index.build import build_index
from trainyard.data.storage.open import open_source
from trainyard.datasets.pack.shards import written_as
from trainyard.errors import DataError

WRITTEN = {
    "webdataset": "mini-train-000000.tar",
    "tfrecord": "train-00000-of-00001",
    "hdf5": "mini-train-000000.h5",
    "packed": "mini-train-000000.packed",
    "parquet": "train-00000-of-00001.parquet",
}
NAMES = ("ape", "bee", "cat", "dog", "été")
ODD_NAMES = ("", " ", "\n", b"\xff".decode(errors="surrogateescape"), "x" * 4000)
# Around what buffers, heap collections, blocks of tars and numbers of protobuf hold.
SIZES = (0, 1, 7, 127, 128, 511, 512, 513, 1000, 4064, 4096, 16_384, 65_535, 65_536, 300_001)


def samples(sizes: Sequence[int] = SIZES) -> list[EncodedSample]:
    random = np.random.default_rng(5)
    return [EncodedSample(random.bytes(s), ".jpg", n * 7 % 5, str(n)) for n, s in enumerate(sizes)]


def written(
    kind: str, folder: Path, found: list[EncodedSample], classes: Sequence[str] | None = NAMES
) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / WRITTEN[kind]
    write = write_samples if kind == "tfrecord" else written_as(kind).write
    assert write is not None
    write(path, iter(found), classes)
    return path


def in_folders(kind: str, folder: Path, found: list[EncodedSample]) -> Path:
    """A folder or a tar of one folder for each class."""
    files = {f"{NAMES[each.label]}/{each.key:0>3}.jpg": each.image for each in found}
    if kind == "folder":
        return Path(write_files(folder, files))
    return write_tar(folder / "a.tar", files.items())


@pytest.mark.parametrize("classes", [NAMES, ODD_NAMES, None], ids=["names", "odd names", "none"])
@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_written_is_read_back(
    tmp_path: Path, kind: str, classes: tuple[str, ...] | None
) -> None:
    path = written(kind, tmp_path, samples(), classes)
    names = classes if classes and kind != "webdataset" else tuple("01234")
    expected = [(names[sample.label], sample.image) for sample in samples()]
    assert stored(path) == stored(tmp_path) == stored(open_splits(tmp_path)["train"]) == expected
    index = build_index(str(path))
    assert (index.format, index.classes) == (kind, tuple(sorted(names)))
    assert index.has_names is (names == classes)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_a_folder_for_each_class(tmp_path: Path, kind: str) -> None:
    found = samples()
    path = in_folders(kind, tmp_path / "data", found)
    found = found[1:]  # but for the empty one
    expected = [(NAMES[sample.label], sample.image) for sample in found]
    assert sorted(stored(path)) == sorted(expected)
    index = build_index(str(path))
    assert (index.format, index.classes, index.has_names) == (kind, NAMES, True)


def test_equal_samples_give_equal_bytes(tmp_path: Path) -> None:
    first = {kind: written(kind, tmp_path / "a", samples()).read_bytes() for kind in WRITTEN}
    time.sleep(1.1)  # lest a time of day go unnoticed
    for kind, content in first.items():
        assert written(kind, tmp_path / "b", samples()).read_bytes() == content


@pytest.mark.parametrize("kind", WRITTEN)
def test_shards_are_one_data_set(tmp_path: Path, kind: str) -> None:
    whole = samples()
    for n, part in enumerate([whole[:9], [], whole[9:]]):
        written(kind, tmp_path, part).rename(tmp_path / f"{n}-{WRITTEN[kind]}")
    assert read_rows(tmp_path) == [(sample.image, sample.label) for sample in whole]


@pytest.mark.parametrize("kind", ["hdf5", "packed"])
def test_shards_with_other_classes_are_refused(tmp_path: Path, kind: str) -> None:
    for name, classes in (("a", NAMES), ("b", (*NAMES, "fox"))):
        written(kind, tmp_path, samples(), classes).rename(tmp_path / f"{name}-{WRITTEN[kind]}")
    second, first = (f"{name}-{WRITTEN[kind]}" for name in "ba")
    with raises("data.files-differ-in-classes", path=tmp_path / second, first=first):
        read_rows(tmp_path)


def rows_or_complaint(path: Path) -> list[tuple[bytes, int]]:
    """The rows that are read; empty after an error, which has one line and names the file."""
    try:
        return read_rows(path)
    except DataError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return []


@pytest.mark.parametrize("kind", [*WRITTEN, "tar"])
def test_a_file_cut_short_anywhere(tmp_path: Path, kind: str) -> None:
    """Samples are not fewer, but where nothing in the format says how many there are."""
    found = samples([5, 300, 0, 700])
    make = in_folders if kind == "tar" else written
    path = make(kind, tmp_path, found)
    content = path.read_bytes()
    borders = [rows for n in range(4) if (rows := read_rows(path)[:n])]
    for length in range(0, len(content.rstrip(b"\0")), 1 if kind == "tfrecord" else 13):
        path.write_bytes(content[:length])
        read = rows_or_complaint(path)
        assert read == [] or (kind == "tfrecord" and read in borders), length


@pytest.mark.parametrize("kind", [*WRITTEN, "tar"])
def test_damage_anywhere_is_an_error_or_nothing(tmp_path: Path, kind: str) -> None:
    found = samples([300] * 9)
    path = (in_folders if kind == "tar" else written)(kind, tmp_path, found)
    content, random, failed = path.read_bytes(), np.random.default_rng(0), 0
    used = np.flatnonzero(np.frombuffer(content, np.uint8))
    for place in random.choice(used, 200, replace=False):
        damaged = bytearray(content)
        damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        rows = rows_or_complaint(path)
        failed += not rows
        assert all(image in damaged for image, _ in rows)
    assert 4 < failed < 200


@pytest.mark.parametrize("kind", ["tfrecord", "packed"])
def test_checksums_find_every_changed_byte(tmp_path: Path, kind: str) -> None:
    path = written(kind, tmp_path, samples([1, 300, 0, 2_100_000]))
    content = path.read_bytes()
    images = [content.index(sample.image) for sample in samples([1, 300])]
    check(kind, path)
    for place in (*range(images[1], images[1] + 300), images[0], len(content) // 2):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with raises(f"{kind}.wrong-checksum", path=path):
            check(kind, path)


def check(kind: str, path: Path) -> None:
    check_shard = all_formats()[kind].check_shard
    assert check_shard is not None
    with closing(open_source(str(path))) as source:
        check_shard(source)


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff\xd8\xff\xe0 a JPEG " * 999, b"\1" * 5000]
)
def test_a_file_is_known_by_its_content(tmp_path: Path, kind: str, content: bytes) -> None:
    (tmp_path / WRITTEN[kind]).write_bytes(content)
    with pytest.raises(DataError, match=f"^{tmp_path}"):
        read_rows(tmp_path / WRITTEN[kind])
