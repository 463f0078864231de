"""Reads samples of slow storage in threads before they are needed: waits for many at once.

Storage that answers an open and a read after 50 ms each gives a thread 10 images a second.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.storage.encoded import EncodedSpans

_THREADS = 256  # reads in flight
_BYTES = 128 << 20  # of images that are read, or to be read, and not yet decoded
_SLOW_S = 5e-4  # seconds for an image; whoever needs images of faster storage reads them then
_MEMORY = 256  # images over which the seconds are averaged
_GROUP = 32  # images that a call reads, at most
_GROUP_S = 16e-3  # seconds that a call should take; from slower storage it reads one image

Rows = NDArray[np.intp]
"""Positions of images among those that were announced."""
Unreadable = dict[int, str]
"""Reasons why images cannot be read, by their positions among others."""


class Images(NamedTuple):
    """Encoded images; those that cannot be read are empty."""

    spans: EncodedSpans
    unreadable: Unreadable

    def part(self, rows: Rows) -> "Images":
        """Some of the images."""
        bad = {n: self.unreadable[row] for n, row in enumerate(rows) if row in self.unreadable}
        return Images(self.spans.part(rows), bad)

    def replaced(self, rows: Rows, by: "Images") -> "Images":
        """The images with those at `rows` replaced by others."""
        sources, which, offsets, lengths = self.spans
        which, offsets, lengths = which.copy(), offsets.copy(), lengths.copy()
        which[rows], offsets[rows], lengths[rows] = by.spans[1:]
        which[rows] += len(sources)
        bad = {int(rows[n]): reason for n, reason in by.unreadable.items()}
        spans = EncodedSpans([*sources, *by.spans.sources], which, offsets, lengths)
        return Images(spans, self.unreadable | bad)


class Group:
    """Images that one call reads, in one thread."""

    def __init__(
        self, read: Callable[[], Images], rows: Rows, size: int, freed: "SimpleQueue[int]"
    ) -> None:
        self.num_unused, self.size = len(rows), size  # images and bytes
        self._read, self._rows, self._freed = read, rows, freed
        self._images: Future[Images] = Future()
        self._claim = threading.Lock()

    def images(self, rows: Rows) -> Images:
        """Some of the images, by their rows in what was announced."""
        return self.read().part(np.searchsorted(self._rows, rows))

    def read(self) -> Images:
        """All images. The first thread that calls it reads them, others wait."""
        if self._claim.acquire(blocking=False):
            try:
                self._images.set_result(self._read())
            except BaseException as error:
                self._images.set_exception(error)
        return self._images.result()

    def is_begun(self) -> bool:
        return self._claim.locked()

    def is_read(self) -> bool:
        return self._images.done()

    def __del__(self) -> None:
        self._freed.put(self.size)  # a finalizer may not take a lock


class ReadAhead:
    """Reads groups in the order in which they are announced, as far as there is memory."""

    def __init__(self, most_threads: int) -> None:
        self._pool = ThreadPoolExecutor(min(_THREADS, most_threads), "read-ahead")
        self._lock = threading.Lock()
        self._waiting: deque[Group] = deque()
        self._last: Callable[[], Group | None] = lambda: None  # of all that were announced
        self._held = 0  # bytes of groups that threads were given
        self._freed: SimpleQueue[int] = SimpleQueue()
        self._seconds = 4e-3  # for an image

    def groups_of(self, rows: Rows) -> list[Rows]:
        """The rows by groups that calls should read; none if the storage is fast."""
        if self._seconds < _SLOW_S:
            return []
        length = min(_GROUP, max(1, int(_GROUP_S / self._seconds)))
        return [rows[first : first + length] for first in range(0, len(rows), length)]

    def announce(self, read: Callable[[], Images], rows: Rows, size: int) -> Group:
        """A group of images of `size` bytes, which `read` will read. `rows`: rising numbers."""
        group = Group(read, rows, size, self._freed)
        with self._lock:
            self._waiting.append(group)
            self._last = weakref.ref(group)
        return group

    def start(self) -> None:
        """Has threads read what is announced and fits into memory."""
        with self._lock:
            while not self._freed.empty():
                self._held -= self._freed.get()
            while self._waiting and self._fits(self._waiting[0]):
                group = self._waiting.popleft()
                self._held += group.size
                if not group.is_begun():
                    self._pool.submit(group.read)

    def is_far_enough(self) -> bool:
        """True if announcing more gains nothing."""
        last = self._last()
        return bool(self._waiting) or last is None or last.is_read()

    def _fits(self, group: Group) -> bool:
        return not self._held or self._held + group.size <= _BYTES

    def judge(self, seconds: float, count: int) -> None:
        """Judges the storage by the seconds in which a read of `count` images waited for it."""
        self._seconds += (seconds / max(1, count) - self._seconds) * count / (count + _MEMORY)
