"""Files behind HTTP and HTTPS, read by byte ranges."""

from collections.abc import AsyncIterator

import aiohttp

from trainyard.data.storage.remote.remote_file import RemoteFile
from trainyard.data.storage.remote.request import (
    CONTENT_RANGE,
    Resource,
    total_size,
    validator,
    within,
)
from trainyard.data.storage.remote.retry import Refused, Transient
from trainyard.errors import DataError

_MAX_WITHOUT_RANGES = 16 << 20  # bytes; a larger file is not fetched whole for each part


class HttpFile(RemoteFile):
    """A file on a web server."""

    def __init__(self, url: str) -> None:
        self._resource = Resource(url)
        self.name, self.server = self._resource.name, self._resource.server
        self._has_ranges = True
        self._whole: bytes | None = None  # of a server without ranges

    async def look(self) -> None:
        """The request is for one byte, not a HEAD request, which signed URLs refuse."""
        async with self._resource.get("bytes=0-0") as response:
            self._has_ranges = response.status != 200
            size = total_size(response)
            if size is None:
                raise Refused("storage.no-size", url=self.name)
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
            self._check(response, offset, size)
            skip = offset if response.status == 200 else 0
            async with within(skip + size):
                while size and (part := await response.content.readany()):
                    skipped = min(skip, len(part))
                    skip -= skipped
                    part = part[skipped : skipped + size]
                    size -= len(part)
                    yield part
        if size:
            raise Transient("the transfer was interrupted")

    def _check(self, response: aiohttp.ClientResponse, offset: int, size: int) -> None:
        """DataError unless an answer holds these bytes of the file that was opened."""
        found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        span = (str(offset), str(offset + size - 1))
        if response.status == 200 and self.size > _MAX_WITHOUT_RANGES:
            raise DataError("storage.no-ranges", url=self.name)
        if response.status == 206 and (found is None or (found[1], found[2]) != span):
            raise DataError("storage.wrong-range", url=self.name)
        if [validator(response), total_size(response)] != self.stamp:
            raise DataError("storage.changed-while-read", url=self.name)
