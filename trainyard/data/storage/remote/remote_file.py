"""A file on a server, read by byte ranges: what HTTP and the object stores share.

Requests wait for a server that is away for a while, and a broken transfer resumes at the byte where
it broke. A file that has changed or is gone on the server ends the run.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Self

from trainyard.data.storage.remote.client import run
from trainyard.data.storage.remote.retry import RetryState, Transient
from trainyard.data.storage.source import CUT_SHORT, Closing, Stamp, reason_of
from trainyard.errors import DataError

# Headers of a tar are many small reads close together, so small reads read ahead.
_SMALL = 4096  # bytes
_MIN_WINDOW, _MAX_WINDOW = 8 << 10, 256 << 10  # bytes; grows while reads are consecutive


class RemoteFile(Closing):
    """A `Source` on a server, once it is open or known from an index."""

    name: str
    server: str
    size = -1  # not known yet
    stamp: Stamp
    _is_indexed = False
    _window = (0, b"")  # start, and the bytes read ahead

    @abstractmethod
    async def stat(self) -> None:
        """Sets size and stamp, by one request. OSError if there is no such file."""

    @abstractmethod
    def stream(self, offset: int, size: int) -> AsyncIterator[bytes]:
        """The bytes of a range as they come, by one request.

        Transient if it breaks off, DataError if the answer is not this part of this file.
        """

    async def open(self) -> Self:
        """The same file, once it is known to exist. OSError if it does not."""
        retries = RetryState(self.name, self.server)
        while True:
            try:
                await self.stat()
                return self
            except Transient as failure:
                await asyncio.sleep(retries.pause_after(failure))

    def indexed(self, stamp: Stamp | None) -> Self:
        """The same file. Its stamp in an index, if there is one, spares the request of `open`."""
        if stamp is not None:
            self.stamp, self.size, self._is_indexed = stamp, int(stamp[1]), True
        return self

    def changed(self) -> DataError:
        """The error of an answer with another stamp."""
        if self._is_indexed:
            return DataError("data.changed-since-indexed", path=self.name)
        return DataError("storage.changed-while-read", url=self.name)

    async def fetch(self, offset: int, size: int) -> bytes:
        """Like `read`, in the event loop, and without reading ahead."""
        if self.size < 0:
            await self.open()
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OSError(f"{self.name} {CUT_SHORT}")
        retries = RetryState(self.name, self.server)
        parts: list[bytes] = []
        while size:
            try:
                async for part in self.stream(offset, size):
                    parts.append(part)
                    offset, size = offset + len(part), size - len(part)
                    retries.reset()
            except (FileNotFoundError, PermissionError) as error:
                reason = reason_of(error, self.name)
                raise DataError(
                    "storage.gone",
                    "{url}: {reason}; it was readable before",
                    url=self.name,
                    reason=reason,
                ) from None
            except Transient as failure:
                await asyncio.sleep(retries.pause_after(failure))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes; see `Source`."""
        start, content = self._window  # read once, since other threads replace it
        if start <= offset <= offset + size <= start + len(content):
            return content[offset - start : offset - start + size]
        if size > _SMALL or not 0 <= offset <= offset + size <= self.size:
            return run(self.fetch(offset, size))
        is_next = 0 <= offset - start - len(content) <= len(content)
        length = min(max(2 * len(content), _MIN_WINDOW), _MAX_WINDOW) if is_next else _MIN_WINDOW
        content = run(self.fetch(offset, min(length, self.size - offset)))
        self._window = offset, content
        return content[:size]

    def close(self) -> None:
        """Lets go of what was read ahead; connections belong to the process."""
        self._window = (0, b"")
