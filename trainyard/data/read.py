"""The stored bytes of samples, by offset, from any thread."""

import threading
from collections import OrderedDict

from trainyard.data.index import Index
from trainyard.data.source import is_remote, open_source

_MAX_OPEN = 256  # shards held open; far below the usual limit of 1024 descriptors


class Reader:
    """Reads samples of an index; a file of many samples stays open between reads."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._shared = len(index.file_names) < len(index)  # several samples to a file
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, sample: int) -> bytes:
        """The encoded image. OSError if it cannot be read whole, DataError if no file can."""
        name, offset, size = self._index.locate(sample)
        if not self._shared and not offset and not is_remote(name):
            return _whole(name, size)
        file = self._acquire(name)
        try:
            return file.source.read(offset, size)
        finally:
            self._release(file)

    def _acquire(self, name: str) -> "_OpenFile":
        with self._lock:
            file = self._open.pop(name, None) or _OpenFile(name)
            file.users += 1
            self._open[name] = file
            if len(self._open) > _MAX_OPEN:
                oldest = next(iter(self._open.values()))
                oldest.evicted = True
                del self._open[oldest.name]
                oldest.close_if_unused()
            return file

    def _release(self, file: "_OpenFile") -> None:
        with self._lock:
            file.users -= 1
            file.close_if_unused()


class _OpenFile:
    def __init__(self, name: str) -> None:
        self.name = name
        self.source = open_source(name)
        self.users = 0
        self.evicted = False

    def close_if_unused(self) -> None:
        if self.evicted and not self.users:
            self.source.close()


def _whole(name: str, size: int) -> bytes:
    with open(name, "rb") as file:
        content = file.read()
    if len(content) != size:
        raise OSError(f"{name} has changed since it was indexed: run `trainyard data index`")
    return content
