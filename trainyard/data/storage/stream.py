"""A source as a Python file object, for libraries that read files."""

import io
from typing import TYPE_CHECKING

from trainyard.data.storage.source import Source

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class SourceStream(io.RawIOBase):
    """Reads a source from any position."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}
        self._position = starts[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        size = min(len(view), max(0, self._source.size - self._position))
        if size:  # a damaged file may ask for any position
            view[:size] = self._source.read(self._position, size)
        self._position += size
        return size
