"""The stored bytes of samples, by offset, from any thread."""

import os
import threading
from collections import OrderedDict

from trainyard.data.index import Index
from trainyard.data.source import Source, Stamp, is_remote, open_indexed
from trainyard.data.stage.copies import Copies

_MAX_OPEN = 256  # shards held open; far below the usual limit of 1024 descriptors
_MAX_REMOTE = 8192  # takes no descriptors, and to open one costs a round trip


class Reader:
    """Reads samples of an index; a file of many samples stays open between reads."""

    def __init__(self, index: Index, copies: Copies | None = None) -> None:
        self._index = index
        self._copies = copies
        self._shared = len(index.file_names) < len(index)  # several samples to a file
        self._local, self._remote = _OpenFiles(_MAX_OPEN), _OpenFiles(_MAX_REMOTE)

    def read(self, sample: int) -> bytes:
        """The encoded image. OSError if it cannot be read whole, DataError if no file can."""
        content = self._from_copy(sample)
        if content is not None:
            return content
        name, offset, size = self._index.locate(sample)
        if not self._shared and not offset and not is_remote(name):
            return _whole(name, size)
        return self._part(name, offset, size)

    def _from_copy(self, sample: int) -> bytes | None:
        """From this node's copy, if there is one by now."""
        copy = self._copies.find(sample) if self._copies else None
        if self._copies is None or copy is None:
            return None
        try:
            content = self._part(copy.path, copy.offset, copy.size)
        except OSError:  # deleted by hand, or a bad disk
            self._copies.forget(copy.number)
            return None
        # No image begins like a hole, which stands for one that could not be copied.
        return content if any(content[:16]) else None

    def _part(self, name: str, offset: int, size: int) -> bytes:
        files = self._remote if is_remote(name) else self._local
        file = files.acquire(name)
        try:
            return file.source(self._stamp_of(name)).read(offset, size)
        finally:
            files.release(file)

    def _stamp_of(self, name: str) -> Stamp | None:
        """What the file looked like when it was indexed, if the index knows."""
        return self._index.stamps.get(name.removeprefix(os.path.join(self._index.root, "")))


class _OpenFiles:
    """Files that stay open between reads, but for those not read for long."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def acquire(self, name: str) -> "_OpenFile":
        with self._lock:
            file = self._open.pop(name, None) or _OpenFile(name)
            file.users += 1
            self._open[name] = file
            if len(self._open) > self._most:
                oldest = next(iter(self._open.values()))
                oldest.evicted = True
                del self._open[oldest.name]
                oldest.close_if_unused()
            return file

    def release(self, file: "_OpenFile") -> None:
        with self._lock:
            file.users -= 1
            file.close_if_unused()


class _OpenFile:
    def __init__(self, name: str) -> None:
        self.name = name
        self.users = 0
        self.evicted = False
        self._source: Source | None = None
        self._opening = threading.Lock()

    def source(self, stamp: Stamp | None) -> Source:
        """Open at first use: a slow server keeps only those waiting who want this very file."""
        with self._opening:
            if self._source is None:
                self._source = open_indexed(self.name, stamp)
            return self._source

    def close_if_unused(self) -> None:
        if self.evicted and not self.users and self._source is not None:
            self._source.close()


def _whole(name: str, size: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)  # half the time of Python's own open
    try:
        content = os.read(fd, size + 1)
    finally:
        os.close(fd)
    if len(content) != size:
        raise OSError(f"{name} has changed since it was indexed: run `trainyard data index`")
    return content
