"""Files behind HTTP and HTTPS, read by byte ranges over persistent connections.

Requests wait for a server that is away for a while (`retry.py`), and a broken transfer resumes
at the byte where it broke. A file that has changed or is gone on the server ends the run.
"""

from collections.abc import Iterator
from contextlib import suppress

from urllib3.exceptions import HTTPError

from trainyard.data.storage.remote.connections import SIZE
from trainyard.data.storage.remote.request import (
    CONTENT_RANGE,
    Resource,
    Response,
    changed,
    reason_of,
    validator,
)
from trainyard.data.storage.remote.retry import Refused, RetryState, Transient
from trainyard.data.storage.source import Stamp
from trainyard.errors import DataError

_PIECE = 8 << 20  # bytes read from a connection at once; smaller reads cost a third of the speed
_MAX_WITHOUT_RANGES = 16 << 20  # bytes; a larger file is not fetched whole for each part
# Headers of a tar are many small reads close together, so small reads read ahead.
_SMALL = 4096  # bytes
_MIN_WINDOW, _MAX_WINDOW = 8 << 10, 256 << 10  # bytes; grows while reads are consecutive


class HttpFile:
    """A file on a web server. OSError if it does not exist; safe to read from many threads."""

    def __init__(self, url: str) -> None:
        self._resource = Resource(url)
        self.name = self._resource.name
        self._window = (0, b"")  # start, and the bytes read ahead
        self.size, self._validator, self._has_ranges = self._look()
        self.stamp: Stamp = [self._validator, self.size]

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OSError(f"{self.name} is truncated or has changed since it was indexed")
        if size <= _SMALL or not self._has_ranges:
            return self._read_ahead(offset, size)
        return self._fetch(offset, size)

    def close(self) -> None:
        """Does nothing: connections belong to the process."""

    def _read_ahead(self, offset: int, size: int) -> bytes:
        start, content = self._window  # read once, since other threads replace it
        if not start <= offset <= offset + size <= start + len(content):
            is_next = 0 <= offset - start - len(content) <= len(content)
            length = (
                min(max(2 * len(content), _MIN_WINDOW), _MAX_WINDOW) if is_next else _MIN_WINDOW
            )
            start, length = (offset, length) if self._has_ranges else (0, self.size)
            content = self._fetch(start, min(length, self.size - start))
            self._window = start, content
        return content[offset - start : offset - start + size]

    def _look(self) -> tuple[int, str, bool]:
        """The size, the server's tag for this version of the file, and True if ranges work.

        The request is for one byte, not a HEAD request, which signed URLs refuse.
        """
        patience = RetryState(self.name, self._resource.server)
        while True:
            try:
                response = self._resource.get_range(0, 0)
            except Transient as failure:
                patience.wait(failure)
                continue
            with response:
                size = response.headers.get("Content-Length")
                has_ranges = response.status != 200
                if has_ranges:
                    found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
                    size = found[3] if found else None
                    _finish(response, 2)
            if not (size and SIZE.fullmatch(size)):
                raise Refused(f"{self.name}: the server does not send its size")
            return int(size), validator(response), has_ranges

    def _fetch(self, offset: int, size: int) -> bytes:
        """Bytes from the server; resumes broken transfers within the time allowed."""
        patience = RetryState(self.name, self._resource.server)
        parts: list[bytes] = []
        while size:
            try:
                for part in self._stream(offset, size):
                    parts.append(part)
                    offset, size = offset + len(part), size - len(part)
                    patience.reset()
            except (FileNotFoundError, PermissionError) as error:
                raise DataError(f"{error}; it was readable before") from None
            except Transient as failure:
                patience.wait(failure)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _stream(self, offset: int, size: int) -> Iterator[bytes]:
        with self._resource.get_range(offset, offset + size - 1) as response:
            self._check(response, offset, size)
            skip = offset if response.status == 200 else 0
            while skip or size:
                try:
                    # No exception at an early end, to keep the bytes received so far.
                    part = response.read(min(skip or size, _PIECE))
                except (HTTPError, OSError) as error:
                    raise Transient(reason_of(error)) from None
                if not part:
                    raise Transient("the transfer was interrupted")
                if skip:
                    skip -= len(part)
                else:
                    size -= len(part)
                    yield part
            if response.status == 206:
                _finish(response, 1)

    def _check(self, response: Response, offset: int, size: int) -> None:
        """DataError unless an answer holds these bytes of the file that was opened."""
        if response.status == 200:
            if self.size > _MAX_WITHOUT_RANGES:
                raise DataError(
                    f"{self.name}: its server cannot send parts of a file (it ignores Range); use "
                    "one that can, such as nginx: trainyard data serve"
                )
            total = response.headers.get("Content-Length", "")
        else:
            found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or (found[1], found[2]) != (str(offset), str(offset + size - 1)):
                raise DataError(f"{self.name}: the server sent another part than the one requested")
            total = found[3]
        if [validator(response), int(total or -1)] != self.stamp:
            raise DataError(changed(self.name))


def _finish(response: Response, size: int) -> None:
    """Reads the end of an answer, less than `size` bytes away, so that its connection is reused.

    The connection of a longer answer is dropped when the answer is closed.
    """
    with suppress(HTTPError, OSError):
        response.read(size)
