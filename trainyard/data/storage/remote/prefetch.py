"""Fetches remote samples ahead of their use: many requests in flight, bounded memory.

The order of samples is known, so ranges are requested long before a decoding thread needs them.
A range covers a sample and its planned neighbours in the same file: random order needs a request
for each image, `data.locality` one for a run of neighbours.

    planned samples  |<------------------- horizon_bytes ------------------->|
    requested        |<-- urgent_bytes -->|   only their neighbours
                     ^ the next sample to be decoded
"""

import asyncio
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from fsspec.asyn import get_loop

from trainyard.data.arrays import Bytes, Int32s, Ints

Fetch = Callable[[int, int, int], Coroutine[Any, Any, bytes]]
"""Reads bytes in the event loop of fsspec, given file number, offset and size. OSError if they
cannot be read, DataError if no others can either. The function retries by itself."""


@dataclass(frozen=True)
class Limits:
    """Limits of one rank. A process needs up to twice `memory_bytes`, by malloc's fragmentation."""

    memory_bytes: int = 128 << 20
    """Bytes of all ranges in flight or not yet decoded."""
    horizon_bytes: int = 100 << 20
    """Bytes of samples that are planned ahead of their use."""
    horizon_samples: int = 8192
    urgent_bytes: int = 40 << 20
    """Bytes by which a sample is requested ahead of its use; 0.25 s at 1,500 images/s."""
    range_bytes: int = 4 << 20
    """Longest range of several samples."""
    gap_bytes: int = 32 << 10
    """Longest gap between samples of a range: reading it is cheaper than another request."""


class Fetched(NamedTuple):
    """A sample inside a fetched range."""

    content: Bytes  # the whole range
    offset: int  # bytes from the start of the range to the sample


class _Range(NamedTuple):
    """The bytes of a file that one request fetches."""

    file: int
    start: int
    stop: int
    content: Future[Bytes]


class _Sample:
    """A planned sample."""

    def __init__(self, file: int, offset: int, size: int, at: int) -> None:
        self.file, self.offset, self.size = file, offset, size
        self.at = at  # its position in the stream of planned bytes
        self.uses = 0
        self.range: _Range | None = None


class Prefetcher:
    """Requests planned samples ahead of their use. Safe to use from many threads."""

    def __init__(self, fetch: Fetch, limits: Limits | None = None) -> None:
        self._fetch, self._limits = fetch, limits or Limits()
        self._lock = threading.Lock()
        self._samples: dict[int, _Sample] = {}
        self._waiting: deque[tuple[int, _Sample]] = deque()  # samples to request, in order
        self._spans: list[tuple[int, int, int]] = []  # file, offset and id of those, sorted
        self._planned = self._taken = 0  # positions in the stream of planned bytes
        self._num_ahead = 0  # samples planned and not yet taken
        self._held = 0  # bytes of ranges in flight or in memory
        self._freed: SimpleQueue[int] = SimpleQueue()  # bytes; a finalizer may not take a lock
        self._new: list[_Range] = []
        self._reading: set[asyncio.Task[None]] = set()

    def expect(
        self,
        ids: Ints,
        files: Int32s,
        offsets: Ints,
        sizes: Ints,
    ) -> None:
        """Plans samples, in about the order in which they will be taken."""
        columns = (ids.tolist(), files.tolist(), offsets.tolist(), sizes.tolist())
        with self._lock:
            for number, file, offset, size in zip(*columns, strict=True):
                if size > 0:
                    self._plan(number, file, offset, size)
            self._request()
            self._send()

    def is_full(self) -> bool:
        """True if samples are planned far enough ahead."""
        limits = self._limits
        is_far = self._planned - self._taken >= limits.horizon_bytes
        return is_far or self._num_ahead >= limits.horizon_samples

    def take(self, ids: Ints) -> list[Fetched | None]:
        """Waits for each sample; None for one that is not planned or cannot be read.

        DataError if no sample of a file can be read.
        """
        with self._lock:
            samples = [self._take(number) for number in ids.tolist()]
            self._request()
            self._send()
        return [None if sample is None else _wait(sample) for sample in samples]

    # --- under the lock ---

    def _plan(self, number: int, file: int, offset: int, size: int) -> None:
        sample = self._samples.get(number)
        if sample is None:  # else a repeat: repeated augmentation, or the next epoch
            sample = self._samples[number] = _Sample(file, offset, size, self._planned)
            self._waiting.append((number, sample))
            insort(self._spans, (file, offset, number))
        sample.uses += 1
        self._planned += size
        self._num_ahead += 1

    def _take(self, number: int) -> _Sample | None:
        sample = self._samples.get(number)
        if sample is None:
            return None
        if sample.range is None:  # needed now, even beyond the memory limit
            self._request_range(number, sample)
        sample.uses -= 1
        self._taken += sample.size
        self._num_ahead -= 1
        if not sample.uses:
            del self._samples[number]
        return sample

    def _request(self) -> None:
        """Requests the samples that are due, as far as the memory limit allows."""
        while not self._freed.empty():
            self._held -= self._freed.get()
        until = self._taken + self._limits.urgent_bytes
        while self._waiting:
            number, sample = self._waiting[0]
            if sample.range is None:
                has_room = self._held + sample.size <= self._limits.memory_bytes
                if sample.at >= until or not has_room:
                    return
                self._request_range(number, sample)
            self._waiting.popleft()

    def _request_range(self, number: int, sample: _Sample) -> None:
        """Requests a sample together with its planned neighbours."""
        index = bisect_left(self._spans, (sample.file, sample.offset, number))
        start, stop = sample.offset, sample.offset + sample.size
        stop, last = self._extended_up(index, start, stop)
        start, stop, first = self._extended_down(index, start, stop)
        wanted = _Range(sample.file, start, stop, Future())
        self._new.append(wanted)
        for _, _, neighbour in self._spans[first:last]:
            self._samples[neighbour].range = wanted
        del self._spans[first:last]
        self._held += stop - start

    def _extended_up(self, index: int, start: int, stop: int) -> tuple[int, int]:
        """The end of a range extended by the neighbours above, and the end of these in places."""
        file, longest, last = self._spans[index][0], self._longest_range(), index + 1
        while last < len(self._spans):
            other, offset, number = self._spans[last]
            end = max(stop, offset + self._samples[number].size)
            if other != file or offset - stop > self._limits.gap_bytes or end - start > longest:
                break
            stop, last = end, last + 1
        return stop, last

    def _extended_down(self, index: int, start: int, stop: int) -> tuple[int, int, int]:
        """Start and end of a range extended by the neighbours below, and the first of these.

        One below may end behind those above it: the spans of Snappy's blocks overlap.
        """
        file, longest, first = self._spans[index][0], self._longest_range(), index
        while first:
            other, offset, number = self._spans[first - 1]
            its_end = offset + self._samples[number].size
            gap, end = start - its_end, max(stop, its_end)
            if other != file or gap > self._limits.gap_bytes or end - offset > longest:
                break
            start, stop, first = offset, end, first - 1
        return start, stop, first

    def _longest_range(self) -> int:
        return min(self._limits.range_bytes, self._limits.memory_bytes - self._held)

    def _send(self) -> None:
        """Hands the new ranges to the event loop, all at once: each call wakes it."""
        if self._new:
            get_loop().call_soon_threadsafe(self._start, self._new)
            self._new = []

    # --- in the event loop ---

    def _start(self, ranges: list[_Range]) -> None:
        for wanted in ranges:
            task = asyncio.create_task(self._read(wanted))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def _read(self, wanted: _Range) -> None:
        size = wanted.stop - wanted.start
        try:
            content = np.frombuffer(await self._fetch(wanted.file, wanted.start, size), np.uint8)
        except BaseException as error:
            self._freed.put(size)
            wanted.content.set_exception(error)
        else:
            weakref.finalize(content, self._freed.put, size).atexit = False
            wanted.content.set_result(content)


def _wait(sample: _Sample) -> Fetched | None:
    wanted = sample.range
    assert wanted is not None
    try:
        return Fetched(wanted.content.result(), sample.offset - wanted.start)
    except OSError:  # a neighbour may have caused it
        return None
