"""Standard streams that do a command no harm when they are closed or when nobody reads them."""

import errno
import io
import os
import select
import sys
from typing import Any

# Of a pipe without a reader, a terminal that has hung up, and a socket.
_NOBODY_READS = (errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ENOTCONN)


class _Output(io.FileIO):
    """An output that drops everything after its first error."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        size = left.nbytes
        while left:
            try:
                written = super().write(left)
            except OSError as error:
                self.error = error
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self.fileno())
                return size
            if written is None:  # another program has made the terminal non-blocking
                select.select((), (self,), ())
            else:
                left = left[written:]
        return size


_stdout: _Output | None = None


def protect_streams() -> None:
    """Make the standard streams of this process safe. It is called before a file is opened.

    A closed one is opened on /dev/null: its number would go to the next file, a checkpoint for
    instance. Output whose reader is gone (`| head`, a closed terminal) is dropped: it raises no
    error in the middle of the work.
    """
    global _stdout
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    _stdout = _Output(1, "w", closefd=False)
    sys.stdout = _text(_stdout, sys.stdout)
    sys.stderr = _text(_Output(2, "w", closefd=False), sys.stderr)


def _text(raw: _Output, before: object) -> io.TextIOWrapper:
    """`raw` as a stream with the settings of the one before, which is None if it was closed.

    A character that its encoding lacks is escaped: it is no reason for a run to end.
    """
    if not isinstance(before, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace")
    buffer: Any = raw if before.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )


def lost_output() -> OSError | None:
    """The error that has cut off stdout, of a full disk for instance; None if nobody reads it."""
    sys.stdout.flush()
    error = _stdout.error if _stdout else None
    return None if error is None or error.errno in _NOBODY_READS else error
