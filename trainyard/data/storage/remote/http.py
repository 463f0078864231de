"""Files behind HTTP and HTTPS, read by byte ranges."""

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

import aiohttp
from fsspec.asyn import get_loop

from trainyard.data.storage.credentials import without_secrets
from trainyard.data.storage.remote.client import run
from trainyard.data.storage.remote.remote_file import RemoteFile
from trainyard.data.storage.remote.request import (
    CONTENT_RANGE,
    Resource,
    total_size,
    transfer_timeout,
    validator,
)
from trainyard.data.storage.remote.retry import Refused, RetryState, Transient
from trainyard.data.storage.source import reason_of
from trainyard.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_MAX_WITHOUT_RANGES = 16 << 20  # bytes; a larger file is not fetched whole for each part


class HttpFile(RemoteFile):
    """A file on a web server."""

    def __init__(self, url: str) -> None:
        self._resource = Resource(url)
        self.name, self.server = self._resource.name, self._resource.server
        self._has_ranges = True
        self._whole: bytes | None = None  # of a server without ranges

    async def stat(self) -> None:
        """The request is for one byte, not a HEAD request, which signed URLs refuse."""
        async with self._resource.get("bytes=0-0") as response:
            self._has_ranges = response.status != 200
            size = total_size(response)
            if size is None:
                raise Refused(
                    "storage.no-size", "{url}: the server does not send its size", url=self.name
                )
            self.size, self.stamp = size, [validator(response), size]
            if self._has_ranges:
                await response.content.read(2)  # to its end, so that the connection is reused

    async def fetch(self, offset: int, size: int) -> bytes:
        if self._has_ranges or (offset, size) == (0, self.size):
            return await super().fetch(offset, size)
        if self._whole is None:
            self._whole = await super().fetch(0, self.size)
        return self._whole[offset : offset + size]

    async def stream(self, offset: int, size: int) -> AsyncIterator[bytes]:
        async with self._resource.get(f"bytes={offset}-{offset + size - 1}") as response:
            self._has_ranges = response.status != 200
            self._check(response, offset, size)
            skip = offset if response.status == 200 else 0
            async with transfer_timeout(skip + size):
                while size and (part := await response.content.readany()):
                    skipped = min(skip, len(part))
                    skip -= skipped
                    part = part[skipped : skipped + size]
                    size -= len(part)
                    yield part
        if size:
            raise Transient("the transfer was interrupted")

    def _check(self, response: aiohttp.ClientResponse, offset: int, size: int) -> None:
        """DataError unless an answer holds these bytes of this file."""
        found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        span = (str(offset), str(offset + size - 1))
        if response.status == 200 and self.size > _MAX_WITHOUT_RANGES:
            raise DataError(
                "storage.no-ranges",
                "{url}: its server cannot send parts of a file (it ignores Range); use one that "
                "can, such as nginx: trainyard data serve",
                url=self.name,
            )
        if response.status == 206 and (found is None or (found[1], found[2]) != span):
            raise DataError("storage.wrong-range", url=self.name)
        if [validator(response), total_size(response)] != self.stamp:
            raise self.changed()


MAX_BYTES = 100 << 20  # larger than any photograph
MAX_S = 60


def fetch_image(url: str) -> bytes:
    """The content of an http or https URL, after up to five redirects.

    DataError, which names the URL, if it fails, takes over a minute or is over 100 MiB.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        raise DataError(
            "storage.image-not-on-web",
            "{url}: images are fetched by http:// and https:// alone, not {scheme}://",
            url=without_secrets(url),
            scheme=scheme,
        )
    resource = Resource(url)
    try:
        return run(_fetched(resource))
    except TimeoutError:
        reason = f"not all of it came within {MAX_S} seconds"
    except (FileNotFoundError, PermissionError) as error:
        reason = reason_of(error, resource.name)
    except Transient as failure:
        reason = str(failure)
    raise DataError("storage.failed", url=resource.name, reason=reason)


async def _fetched(resource: Resource) -> bytes:
    content = bytearray()
    async with asyncio.timeout(MAX_S), resource.get(None) as response:
        while (total_size(response) or len(content)) <= MAX_BYTES >= len(content):
            part = await response.content.readany()
            if not part:
                return bytes(content)
            content += part
    raise DataError(
        "storage.image-too-large",
        "{url}: over {most_mib} MiB, too large for an image",
        url=resource.name,
        most_mib=MAX_BYTES >> 20,
    )


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
    async with transfer_timeout(0):
        return await response.content.readany()
