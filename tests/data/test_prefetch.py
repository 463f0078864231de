"""Samples fetched ahead: the right bytes, whatever the order, with bounded memory and requests."""

import asyncio
import random
import threading

import numpy as np

from tests.errors import raises
from trainyard.data.storage.remote.client import run
from trainyard.data.storage.remote.prefetch import Fetched, Limits, Prefetcher
from trainyard.errors import DataError

FILES = [random.Random(number).randbytes(200_000) for number in range(3)]
SIZE = 1000
PER_FILE = len(FILES[0]) // SIZE


class Store:
    """Files read by ranges, slowly; it remembers the ranges and how many were read at once."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.ranges: list[tuple[int, int, int]] = []
        self.at_once = self.most_at_once = 0
        self.errors: dict[int, Exception] = {}  # by file

    async def read(self, file: int, offset: int, size: int) -> bytes:
        self.ranges.append((file, offset, size))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.seconds)
        self.at_once -= 1
        if file in self.errors:
            raise self.errors[file]
        if offset + size > len(FILES[file]):
            raise OSError("cut short")
        return FILES[file][offset : offset + size]


def expect(prefetcher: Prefetcher, ids: list[int], *, gap: int = 0) -> None:
    """Samples of SIZE bytes, one after another in each file, with a gap after each."""
    numbers = np.array(ids, np.int64)
    file, place = np.divmod(numbers, PER_FILE)
    offsets, sizes = place * SIZE, np.full(len(ids), SIZE - gap, np.int64)
    prefetcher.expect(numbers, file.astype(np.int32), offsets, sizes)


def take(prefetcher: Prefetcher, ids: list[int]) -> list[Fetched | None]:
    return prefetcher.take(np.array(ids, np.int64))


def content(fetched: Fetched | None, size: int = SIZE) -> bytes:
    assert fetched is not None
    return fetched.content[fetched.offset : fetched.offset + size].tobytes()


def right(number: int, size: int = SIZE) -> bytes:
    file, place = divmod(number, PER_FILE)
    return FILES[file][place * SIZE : place * SIZE + size]


def shuffled(count: int = 3 * PER_FILE, seed: int = 0) -> list[int]:
    ids = list(range(count))
    random.Random(seed).shuffle(ids)
    return ids


def test_bytes_are_right_and_requests_and_memory_are_bounded() -> None:
    limits = Limits(
        memory_bytes=60_000,
        horizon_bytes=40_000,
        urgent_bytes=30_000,
        range_bytes=4_000,
        gap_bytes=0,
    )
    store = Store(seconds=0.002)
    prefetcher = Prefetcher(store.read, limits)
    ids = shuffled()
    planned = most_held = 0
    for first in range(0, len(ids), 10):
        while planned < len(ids) and not prefetcher.is_full():
            expect(prefetcher, ids[planned : planned + 10])
            planned += 10
        assert planned - first <= 50  # samples: the horizon, and what is planned at once
        part = ids[first : first + 10]
        assert [content(fetched) for fetched in take(prefetcher, part)] == list(map(right, part))
        most_held = max(most_held, prefetcher._held)
    assert 4 <= store.most_at_once <= limits.memory_bytes // SIZE
    assert 30_000 <= most_held <= limits.memory_bytes
    assert sum(size for *_, size in store.ranges) == 3 * len(FILES[0])  # nothing is read twice


def test_memory_is_given_back_when_the_samples_are_done_with() -> None:
    prefetcher = Prefetcher(Store().read)
    expect(prefetcher, list(range(20)))
    some, others = take(prefetcher, list(range(10))), take(prefetcher, list(range(10, 20)))
    run(asyncio.sleep(0.01))  # until the event loop has let go of them
    prefetcher._request()
    assert prefetcher._held == 20 * SIZE
    del some
    prefetcher._request()
    assert prefetcher._held == 20 * SIZE  # they share a range with the others
    del others
    prefetcher._request()
    assert prefetcher._held == 0
    assert not prefetcher._samples and not prefetcher._spans and not prefetcher._waiting


def test_neighbours_share_a_range_as_long_as_it_is_short() -> None:
    store = Store()
    prefetcher = Prefetcher(store.read, Limits(range_bytes=50_000, gap_bytes=100))
    ids = shuffled()
    expect(prefetcher, ids, gap=100)
    assert [content(fetched, 900) for fetched in take(prefetcher, ids)] == [
        right(number, 900) for number in ids
    ]
    assert len(store.ranges) <= 3 * 2 * 4  # four full ones for each file, and what is between them
    assert max(size for *_, size in store.ranges) <= 50_000
    store.ranges.clear()
    prefetcher = Prefetcher(store.read, Limits(gap_bytes=99))
    expect(prefetcher, ids[:50], gap=100)
    take(prefetcher, ids[:50])
    assert len(store.ranges) == 50


def test_spans_that_enclose_others_are_whole() -> None:
    """Samples of one Snappy block overlap; a sample may end behind the one above it."""
    store = Store()
    prefetcher = Prefetcher(store.read)
    ids = np.array([1, 0, 2], np.int64)
    offsets, sizes = (
        np.array([4_000, 1_000, 6_000], np.int64),
        np.array([500, 9_000, 700], np.int64),
    )
    prefetcher.expect(ids, np.zeros(3, np.int32), offsets, sizes)
    for number, offset, size in zip(ids.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
        fetched = take(prefetcher, [number])[0]
        assert content(fetched, size) == FILES[0][offset : offset + size]
    assert store.ranges == [(0, 1_000, 9_000)]


def test_neighbours_that_are_needed_much_later_come_along() -> None:
    """Only the first sample is urgent; of the others those beside it are fetched with it."""
    store = Store()
    prefetcher = Prefetcher(store.read, Limits(urgent_bytes=1, gap_bytes=0))
    expect(prefetcher, [5, 400, 6, 300, 4, 7])
    take(prefetcher, [5])
    assert store.ranges[0] == (0, 4 * SIZE, 4 * SIZE)
    assert len(store.ranges) <= 2


def test_a_sample_that_comes_again_soon_is_fetched_once() -> None:
    store = Store()
    prefetcher = Prefetcher(store.read, Limits(horizon_bytes=6 * SIZE))
    expect(prefetcher, [3, 3, 3, 100, 3])
    assert not prefetcher.is_full()
    expect(prefetcher, [100])
    assert prefetcher.is_full()
    for part in ([3, 3], [3, 100], [3, 100]):
        assert [content(fetched) for fetched in take(prefetcher, part)] == list(map(right, part))
    assert len(store.ranges) == 2
    assert take(prefetcher, [3]) == [None]  # not planned


def test_a_sample_larger_than_the_memory_is_fetched_when_it_is_wanted() -> None:
    store = Store()
    prefetcher = Prefetcher(store.read, Limits(memory_bytes=SIZE // 2))
    ids = shuffled()[:50]
    expect(prefetcher, ids)
    assert store.ranges == []
    for number in ids:
        assert content(take(prefetcher, [number])[0]) == right(number)


def test_threads_that_take_samples_out_of_order_all_get_them() -> None:
    prefetcher = Prefetcher(Store(seconds=0.001).read, Limits(memory_bytes=20_000))
    ids = shuffled()
    expect(prefetcher, ids)
    wrong: list[int] = []

    def work(parts: list[list[int]]) -> None:
        for part in parts:
            found = [content(fetched) for fetched in take(prefetcher, part)]
            wrong.extend(n for n, is_ in zip(part, found, strict=True) if is_ != right(n))

    parts = [ids[first : first + 5] for first in range(0, len(ids), 5)]
    threads = [threading.Thread(target=work, args=(parts[n::4][::-1],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []


def test_what_cannot_be_read_is_left_to_the_caller() -> None:
    """A sample beyond the end of its file spoils the range that it shares, for others too."""
    prefetcher = Prefetcher(Store().read)
    expect(prefetcher, [3 * PER_FILE - 1])
    end = np.array([1000])
    prefetcher.expect(end, np.array([2], np.int32), np.array([len(FILES[2]) - 10]), np.array([100]))
    expect(prefetcher, [3])
    found = take(prefetcher, [3 * PER_FILE - 1, 1000, 3])
    assert found[1] is None
    assert content(found[2]) == right(3)


def test_data_that_is_gone_ends_the_run() -> None:
    store = Store()
    store.errors[1] = DataError("storage.gone", url="https://host/1", reason="no such file")
    prefetcher = Prefetcher(store.read)
    expect(prefetcher, [0, PER_FILE])
    assert content(take(prefetcher, [0])[0]) == right(0)
    with raises("storage.gone"):
        take(prefetcher, [PER_FILE])
