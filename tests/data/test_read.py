"""The bytes of samples from many files at once, from many threads."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.data.tars import Patch, random_shards, write_files
from trainyard.data._native import core
from trainyard.data.index.build import open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.reading.reader import Reader
from trainyard.data.storage import encoded
from trainyard.data.storage.encoded import EncodedSpans
from trainyard.data.storage.source import LocalFile


def open_tars(folder: Path) -> list[str]:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if os.path.islink(link)]
    return [t for t in targets if t.startswith(str(folder)) and t.endswith(".tar")]


def test_many_shards_stay_within_the_limit(tmp_path: Path, monkeypatch: Patch) -> None:
    """An eighth of the descriptors that a process may have."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    index, contents = random_shards(tmp_path, [2] * 300)
    reader = Reader(index)
    assert [reader.read(sample) for sample in range(len(index))] == contents
    assert len(open_tars(tmp_path)) == 128
    del reader
    assert not open_tars(tmp_path)


# --- many samples in one call ---


def contents_of(reader: Reader, ids: list[int]) -> tuple[list[bytes], dict[int, str]]:
    """What is read of announced samples, and why some cannot be read."""
    ticket = reader.prefetch(np.array(ids, np.int64))
    ((_, stored, unreadable),) = ticket.read(slice(0, len(ids)))
    contents, unread = encoded.contents_of(stored)
    return contents, unreadable | unread


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [3, 0, 0], [1, 5, 40]], ids=str)
def test_a_slice_of_shards(tmp_path: Path, sizes: list[int]) -> None:
    index, contents = random_shards(tmp_path, sizes)
    reader = Reader(index)
    assert [reader.read(sample) for sample in range(len(index))] == contents
    for count in (0, 1, 3, 50):
        ids = np.random.default_rng(count).integers(len(contents), size=count).tolist()
        assert contents_of(reader, ids) == ([contents[sample] for sample in ids], {})


def test_a_slice_of_files(tmp_path: Path) -> None:
    """The files of one folder, and of two merged folders."""
    generator = np.random.default_rng(0)
    for folder in ("one", "two"):
        sizes = generator.integers(1, 300_000, 15).tolist()
        files = {f"{n % 3}/{n:02d}-é.jpg": generator.bytes(size) for n, size in enumerate(sizes)}
        write_files(tmp_path / folder, files)
    parts = [str(tmp_path / folder) for folder in ("one", "two")]
    for index in (open_index(parts[0]), open_merged(parts, None)):
        reader = Reader(index)
        expected = [Path(index.locate(sample)[0]).read_bytes() for sample in range(len(index))]
        for count in (0, 1, 15, 7, 100):
            ids = np.random.default_rng(count).integers(len(index), size=count).tolist()
            assert contents_of(reader, ids) == ([expected[sample] for sample in ids], {})


def test_files_that_cannot_be_read_are_named_as_one_by_one(tmp_path: Path) -> None:
    files = {f"0/{number}.jpg": bytes([number]) * 100 for number in range(6)}
    index = open_index(write_files(tmp_path, files))
    gone, folder = (tmp_path / "0" / f"{number}.jpg" for number in (0, 3))
    gone.unlink()
    folder.unlink()
    folder.mkdir()
    reader = Reader(index)
    found, unreadable = contents_of(reader, [5, 0, 1, 3, 4])
    assert found == [b"\5" * 100, b"", b"\1" * 100, b"", b"\4" * 100]
    assert list(unreadable) == [1, 3]
    for position, sample in ((1, 0), (3, 3)):
        with pytest.raises(OSError) as caught:
            reader.read(sample)
        assert unreadable[position].startswith(str(caught.value))


def test_threads_that_read_more_files_than_stay_open(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (16, 16))
    index, contents = random_shards(tmp_path, [5] * 12)

    def hammer(reader: Reader, seed: int) -> bool:
        generator = np.random.default_rng(seed)
        for _ in range(100):
            ids = generator.integers(len(contents), size=10).tolist()
            assert contents_of(reader, ids)[0] == [contents[sample] for sample in ids]
            assert reader.read(ids[0]) == contents[ids[0]]
        return True

    reader = Reader(index)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(hammer, [reader] * 8, range(8)))
    assert len(open_tars(tmp_path)) == 2
    del reader
    assert not open_tars(tmp_path)


def test_a_shard_that_was_cut_short(tmp_path: Path) -> None:
    index, contents = random_shards(tmp_path, [4])
    os.truncate(tmp_path / "shard-0000.tar", int(index.offset[3]) + 1)
    reader = Reader(index)
    assert reader.read(2) == contents[2]
    with pytest.raises(OSError, match="has changed since it was indexed") as caught:
        reader.read(3)
    found, unreadable = contents_of(reader, [3, 1, 2])
    assert (found, unreadable) == ([b"", contents[1], contents[2]], {0: str(caught.value)})


def test_an_image_file_that_is_saved_again_is_read_as_it_is_now(tmp_path: Path) -> None:
    """A run of days loses no image that is compressed anew meanwhile, nor reads half of one."""
    names = ["a/0.jpg", "a/1.jpg", "b/0.jpg"]
    write_files(tmp_path, {name: name.encode() for name in names})
    reader = Reader(open_index(str(tmp_path)))
    now = [b"longer than before", b"short", b"b/0.jpg"]
    write_files(tmp_path, dict(zip(names, now, strict=True)))
    assert contents_of(reader, [2, 1, 0]) == ([*reversed(now)], {})
    assert [reader.read(sample) for sample in range(3)] == now
    (tmp_path / "a/0.jpg").unlink()
    found, unreadable = contents_of(reader, [0, 1])
    assert found == [b"", b"short"]
    assert "No such file" in unreadable[0]


# --- reading ahead ---


def is_in_memory(images: EncodedSpans) -> bool:
    """True if no image has to be waited for."""
    (file,) = images.sources
    assert isinstance(file, LocalFile)
    spans = zip(images.offsets.tolist(), images.lengths.tolist(), strict=True)
    try:
        return all(
            os.preadv(file.fileno(), [bytearray(size)], offset, os.RWF_NOWAIT) == size
            for offset, size in spans
        )
    except BlockingIOError:
        return False


@pytest.mark.skipif(core is None, reason="needs the extension in C")
def test_what_is_expected_is_read_ahead_from_storage(tmp_path: Path) -> None:
    path = tmp_path / "images"
    with open(path, "wb") as file:
        file.write(os.urandom(20 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    count, length = 40, 110_000
    offsets = np.arange(count) * (length + 300_000)
    where = np.zeros(count, np.int64), offsets, np.full(count, length)
    images = EncodedSpans([LocalFile(str(path))], *where)
    assert not is_in_memory(images)
    are_in_memory = np.ones(count, bool)
    core.will_need(*images, are_in_memory)
    assert not are_in_memory.any()
    deadline = time.monotonic() + 20  # other work may keep the disk busy
    while not is_in_memory(images):
        assert time.monotonic() < deadline, "the images were not read ahead"
        time.sleep(0.1)
    core.will_need(*images, are_in_memory)
    assert are_in_memory.all()
