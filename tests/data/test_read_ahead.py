"""Slow storage: its samples are read by many threads before they are needed."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.data.tars import Patch, random_shards, write_files
from trainyard.data.index.build import open_index
from trainyard.data.index.table import Index
from trainyard.data.reading import ahead
from trainyard.data.reading.ahead import Images
from trainyard.data.reading.reader import Reader, Ticket
from trainyard.data.sampler.plan import Ids
from trainyard.errors import DataError


def shards(folder: Path) -> Index:
    return random_shards(folder, [5] * 12)[0]


def files(folder: Path) -> Index:
    contents = np.random.default_rng(0)
    names = (f"{n % 3}/{n:02d}.jpg" for n in range(60))
    return open_index(write_files(folder, {name: contents.bytes(900) for name in names}))


KINDS = pytest.mark.parametrize("data", [shards, files])


def slow(index: Index, seconds: float = 0.05) -> Reader:
    """A reader that has seen a storage this slow; it does not look again."""
    reader = Reader(index)
    reader.ahead._seconds = seconds
    reader.ahead.judge = lambda seconds, count: None  # type: ignore[method-assign]
    return reader


def contents(ticket: Ticket, *parts: slice) -> list[bytes]:
    pieces = [piece for part in parts for piece in copied(ticket, part)]
    return [content for piece in pieces for content in piece]


def copied(ticket: Ticket, part: slice) -> list[list[bytes]]:
    return [
        [images.content(row) for row in range(rows.stop - rows.start)]
        for rows, images, _ in ticket.read(part)
    ]


@KINDS
@pytest.mark.parametrize("seconds", [0.05, 0.004, 0.0], ids=str)
def test_any_parts_in_any_order(
    tmp_path: Path, data: Callable[[Path], Index], seconds: float
) -> None:
    index = data(tmp_path)
    plain, reader = Reader(index), slow(index, seconds)
    generator = np.random.default_rng(0)
    for _ in range(5):
        ids = generator.integers(len(index), size=50)
        ticket, cut = reader.prefetch(ids), int(generator.integers(50))
        expected = [plain.read(sample) for sample in ids.tolist()]
        assert contents(ticket, slice(cut, 50), slice(0, cut)) == expected[cut:] + expected[:cut]


@KINDS
def test_samples_are_waited_for_together(
    tmp_path: Path, data: Callable[[Path], Index], monkeypatch: Patch
) -> None:
    """Each of ten reads goes on once all have begun."""
    reader = slow(data(tmp_path))
    read_all, all_begun = reader.read_all, threading.Barrier(10)

    def waiting(ids: Ids) -> Images:
        all_begun.wait(60)
        return read_all(ids)

    monkeypatch.setattr(reader, "read_all", waiting)
    ticket = reader.prefetch(np.arange(10))
    assert contents(ticket, slice(0, 10)) == [reader.read(sample) for sample in range(10)]


def test_memory_is_bounded_and_freed(tmp_path: Path, monkeypatch: Patch) -> None:
    """Three of the files fit: the others are read once these are used."""
    monkeypatch.setattr(ahead, "_BYTES", 3 * 900)
    index = files(tmp_path)
    reader, begun, several = slow(index), list[int](), threading.Semaphore(0)
    read_all = reader.read_all

    def noted(ids: Ids) -> Images:
        begun.extend(ids.tolist())
        several.release()
        return read_all(ids)

    monkeypatch.setattr(reader, "read_all", noted)
    ticket = reader.prefetch(np.arange(9))
    for count in (3, 6, 9):
        for _ in range(3):
            assert several.acquire(timeout=60)
        assert sorted(begun) == list(range(count))
        contents(ticket, slice(count - 3, count))


def test_readers_that_outrun_the_threads_read_by_themselves(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(ahead, "_BYTES", 0)  # one group at a time
    index = files(tmp_path)
    reader, plain = slow(index), Reader(index)
    ticket = reader.prefetch(np.arange(60))
    parts = [slice(start, start + 5) for start in range(0, 60, 5)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda part: contents(ticket, part), reversed(parts)))
    for part, each in zip(reversed(parts), found, strict=True):
        assert each == [plain.read(sample) for sample in range(60)[part]]


@KINDS
def test_what_cannot_be_read_is_told(tmp_path: Path, data: Callable[[Path], Index]) -> None:
    index = data(tmp_path)
    for name in list(index.file_names)[:2]:
        (tmp_path / name).unlink()
    told = []
    for seconds in (0.05, 0.004, 0.0):
        ticket = slow(index, seconds).prefetch(np.arange(len(index)))
        ((_, _, unreadable),) = ticket.read(slice(0, len(index)))
        told.append(unreadable)
    assert told[0] == told[1] == told[2]
    assert set(told[0]) == set(np.flatnonzero(index.file < 2).tolist())


def test_an_error_of_the_whole_data_set_comes_to_the_reader(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    reader = slow(files(tmp_path))

    def failing(ids: Ids) -> Images:
        raise DataError("data.changed-since-indexed", path="x")

    monkeypatch.setattr(reader, "read_all", failing)
    ticket = reader.prefetch(np.arange(4))
    with pytest.raises(DataError):
        contents(ticket, slice(0, 4))


def test_the_speed_of_the_storage_decides(tmp_path: Path) -> None:
    reader = Reader(files(tmp_path))
    rows = np.arange(60)
    for _ in range(100):
        reader.read_all(rows)  # from the page cache: storage is not waited for
    assert reader.ahead.groups_of(rows) == []
    reader.ahead._seconds = 0.004
    assert [len(part) for part in reader.ahead.groups_of(rows)] == [4] * 15
    reader.ahead._seconds = 0.05
    assert len(reader.ahead.groups_of(rows)) == 60
