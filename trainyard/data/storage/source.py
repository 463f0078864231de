"""Files to read by offset: on a disk, behind HTTP, in an object store."""

import errno
import os
import weakref
from stat import S_ISREG
from typing import Protocol

Stamp = list[int | str]
"""A value that changes with a file: time and size, or a server's own tag; plain JSON."""


READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags to open data files with: opening a pipe does not block."""
CUT_SHORT = "is truncated or has changed since it was indexed"


class Source(Protocol):
    """An open file. Safe to read from many threads at once."""

    name: str  # path or URL
    size: int  # bytes
    stamp: Stamp

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes. OSError if they cannot be read, DataError if a retry is useless."""

    def close(self) -> None: ...


class LocalFile:
    """A file of this machine or of a mounted file system; it closes with its last reference.

    OSError if it does not exist or is not a regular file.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._fd = os.open(name, READ_ONLY)
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


def reason_of(error: Exception, name: str) -> str:
    """The text of an error about a file, without the file's name before it."""
    return str(error).removeprefix(f"{name}: ")
