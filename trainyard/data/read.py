"""The stored bytes of samples, by offset, from any thread."""

import os
import threading
from collections import OrderedDict
from pathlib import Path

from trainyard.data.index import Index

_MAX_OPEN = 256  # shards held open; far below the usual limit of 1024 descriptors


class Reader:
    """Reads samples of an index; a file of many samples stays open between reads."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._shared = len(index.file_names) < len(index)  # several samples to a file
        self._open: OrderedDict[Path, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, sample: int) -> bytes:
        """The encoded image; OSError if it cannot be read whole."""
        path, offset, size = self._index.locate(sample)
        if not self._shared and not offset:
            return _whole(path, size)
        file = self._acquire(path)
        try:
            content = os.pread(file.fd, size, offset)
        finally:
            self._release(file)
        return _checked(content, size, path)

    def _acquire(self, path: Path) -> "_OpenFile":
        with self._lock:
            file = self._open.pop(path, None) or _OpenFile(path)
            file.users += 1
            self._open[path] = file
            if len(self._open) > _MAX_OPEN:
                oldest = next(iter(self._open.values()))
                oldest.evicted = True
                del self._open[oldest.path]
                oldest.close_if_unused()
            return file

    def _release(self, file: "_OpenFile") -> None:
        with self._lock:
            file.users -= 1
            file.close_if_unused()


class _OpenFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.users = 0
        self.evicted = False

    def close_if_unused(self) -> None:
        if self.evicted and not self.users:
            os.close(self.fd)


def _whole(path: Path, size: int) -> bytes:
    with open(path, "rb") as file:
        return _checked(file.read(), size, path)


def _checked(content: bytes, size: int, path: Path) -> bytes:
    if len(content) != size:
        raise OSError(f"{path} has changed since it was indexed: run `trainyard data index`")
    return content
