"""Files behind HTTP and HTTPS, read front to back, for servers without range requests."""

import asyncio
import io
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import aiohttp
from fsspec.asyn import get_loop

from trainyard.data.storage.remote.client import run
from trainyard.data.storage.remote.request import (
    CONTENT_RANGE,
    Resource,
    total_size,
    validator,
    within,
)
from trainyard.data.storage.remote.retry import RetryState, Transient
from trainyard.data.storage.source import reason_of
from trainyard.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class HttpStream(io.RawIOBase):
    """The bytes of a URL; a broken transfer resumes after the last byte read.

    Reading raises DataError if the file cannot be read, or has changed since the first answer.
    """

    def __init__(self, url: str) -> None:
        self._resource = Resource(url)
        self.name = self._resource.name
        self._patience = RetryState(self.name, self._resource.server)
        self._transfer: AsyncGenerator[bytes, None] | None = None
        self._rest = b""  # received, and not yet read
        self._position = 0  # bytes received so far
        self._tag: str | None = None  # the server's tag in the first answer
        self._size: int | None = None  # known once an answer states it

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        content = self._rest or run(self._receive())
        count = min(len(view), len(content))
        view[:count], self._rest = content[:count], content[count:]
        return count

    def close(self) -> None:
        if self._transfer is not None:  # without waiting, as the collector may call this anywhere
            asyncio.run_coroutine_threadsafe(self._transfer.aclose(), get_loop())
            self._transfer = None
        super().close()

    async def _receive(self) -> bytes:
        """The next bytes; none at the end."""
        while True:
            self._transfer = self._transfer or self._begin()
            try:
                part = await anext(self._transfer, b"")
            except Transient as failure:
                self._transfer = None
                await asyncio.sleep(self._patience.pause_after(failure))
            except (FileNotFoundError, PermissionError) as error:
                reason = reason_of(error, self.name)
                raise DataError("storage.failed", url=self.name, reason=reason) from None
            else:
                self._position += len(part)
                self._patience.reset()
                return part

    async def _begin(self) -> AsyncGenerator[bytes, None]:
        """The bytes from the position on, of one transfer."""
        span = f"bytes={self._position}-" if self._position else None
        async with self._resource.get(span) as response:
            self._check(response)
            skip = self._position if response.status == 200 else 0
            while part := await _some(response):
                skipped = min(skip, len(part))
                skip -= skipped
                if skipped < len(part):
                    yield part[skipped:]
        if self._size is not None and self._position < self._size:
            raise Transient("the transfer was interrupted")

    def _check(self, response: aiohttp.ClientResponse) -> None:
        """DataError unless an answer goes on with the same file."""
        found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        tag, size = validator(response), total_size(response)
        self._tag = tag if self._tag is None else self._tag
        self._size = size if self._size is None else self._size
        is_next = response.status == 200 or (found and found[1] == str(self._position))
        if tag != self._tag or size not in (None, self._size) or not is_next:
            raise DataError("storage.changed-while-read", url=self.name)


async def _some(response: aiohttp.ClientResponse) -> bytes:
    async with within(0):
        return await response.content.readany()
