"""Opens a shard of a stream: a tar in WebDataset's format.

A shard is a file, a URL of any web server, or `pipe:COMMAND`, the output of a shell command (as in
WebDataset; the command is the user's, and runs as the user).
"""

import io
import os
import subprocess
from typing import IO, TYPE_CHECKING

from trainyard.children import users_environment
from trainyard.data.storage.credentials import PIPE, with_secrets
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER = 1 << 18  # bytes read at once


def open_shard(name: str) -> IO[bytes]:
    """The bytes of a shard, to be read once. Reading raises DataError if it fails."""
    return io.BufferedReader(_open(name), _BUFFER)


def _open(name: str) -> io.RawIOBase:
    if name.startswith(PIPE):
        return Pipe(name)
    if is_remote(name):
        from trainyard.data.storage.remote.http import HttpStream

        return HttpStream(name)
    try:
        return open(name, "rb", buffering=0)
    except OSError as error:
        raise DataError("file.unreadable", path=name, reason=error.strerror) from None


class Pipe(io.RawIOBase):
    """The output of a shell command. DataError at its end if the command failed.

    All processes that the command starts belong to the loader's process group and end with it; the
    signals that end a run are ignored in them, as in the loader. An early `close` kills the shell
    only, since the loader is about to end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", with_secrets(name).removeprefix(PIPE)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=users_environment(),
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        count = os.readv(self._output.fileno(), [buffer])
        if count == 0:
            code = self._process.wait()
            if code:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise DataError(
                    "stream.pipe-failed",
                    "{command}: the command failed ({reason})",
                    command=self.name,
                    reason=how,
                )
        return count

    def close(self) -> None:
        if not self.closed:
            self._process.kill()
            self._process.wait()
            self._output.close()
        super().close()
