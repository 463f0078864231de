"""Files to read by offset: on a disk, behind HTTP, in an object store."""

import errno
import io
import os
import weakref
from abc import ABC, abstractmethod
from stat import S_ISREG
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


Stamp = list[int | str]
"""A value that changes with a file: time and size, or a server's own tag; plain JSON."""


READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags to open data files with: opening a pipe does not block."""
CUT_SHORT = "is truncated or has changed since it was indexed"


class Closing(ABC):
    """A context manager: the end of its block closes it."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Source(Protocol):
    """An open file. Safe to read from many threads at once."""

    name: str  # path or URL
    size: int  # bytes
    stamp: Stamp

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes. OSError if they cannot be read, DataError if a retry is useless."""

    def close(self) -> None: ...


class LocalFile(Closing):
    """A file of this machine or of a mounted file system; it closes with its last reference.

    OSError if it does not exist or is not a regular file.
    """

    def __init__(self, name: str, descriptor: int | None = None) -> None:
        """`descriptor`: of the file, if it is open."""
        self.name = name
        self._fd = os.open(name, READ_ONLY) if descriptor is None else descriptor
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # a thread may still be reading at exit
        stat = os.fstat(self._fd)
        if not S_ISREG(stat.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", name)
        self.size = stat.st_size
        self.stamp: Stamp = [stat.st_mtime_ns, stat.st_size]

    def fileno(self) -> int:
        return self._fd

    def read(self, offset: int, size: int) -> bytes:
        content = os.pread(self._fd, size, offset)
        if len(content) == size:
            return content
        return content + self._rest(offset + len(content), size - len(content))

    def _rest(self, offset: int, size: int) -> bytes:
        """The bytes that a signal, or the limit of 2 GiB per read, left unread."""
        content = b""
        while len(content) < size:
            part = os.pread(self._fd, size - len(content), offset + len(content))
            if not part:
                raise OSError(f"{self.name} {CUT_SHORT}")
            content += part
        return content

    def close(self) -> None:
        self._close()


def is_remote(name: str) -> bool:
    """True for URLs, false for paths."""
    return "://" in name


def real_path(name: str) -> str:
    """A path with its links followed; a URL as it is."""
    return name if is_remote(name) else os.path.realpath(name)


def reason_of(error: Exception, name: str) -> str:
    """The text of an error about a file, without the file's name before it."""
    return str(error).removeprefix(f"{name}: ")


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


_PIECE = 1 << 22  # bytes


def checksum(source: Source, begin: int, end: int) -> int:
    """CRC-32C of the bytes [begin, end)."""
    from crc32c import crc32c  # 25 ms, and each command imports this module

    crc = 0
    for at in range(begin, end, _PIECE):
        crc = crc32c(source.read(at, min(_PIECE, end - at)), crc)
    return crc
