"""Files behind HTTP and HTTPS, read front to back, for servers without range requests."""

import io
from typing import TYPE_CHECKING

import urllib3
from urllib3.exceptions import HTTPError

from trainyard.data.storage.remote.request import (
    CONTENT_RANGE,
    Resource,
    changed,
    reason_of,
    validator,
)
from trainyard.data.storage.remote.retry import RetryState, Transient
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
        self._response: urllib3.BaseHTTPResponse | None = None
        self._position = 0  # bytes read so far
        self._tag: str | None = None  # the server's tag in the first answer
        self._size: int | None = None  # known once an answer states it

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        while True:
            try:
                content = self._read(len(view))
            except Transient as failure:
                self._drop()
                self._patience.wait(failure)
            except (FileNotFoundError, PermissionError) as error:
                raise DataError(str(error)) from None
            else:
                view[: len(content)] = content
                self._position += len(content)
                return len(content)

    def close(self) -> None:
        self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        response = self._response or self._open()
        content = _take(response, size)
        if not content and self._size is not None and self._position < self._size:
            raise Transient("the transfer was interrupted")
        if content:
            self._patience.reset()
        return content

    def _open(self) -> urllib3.BaseHTTPResponse:
        """Starts a transfer of the next bytes; skips to them if the server sends the whole file."""
        span = f"bytes={self._position}-" if self._position else None
        self._response = response = self._resource.get(span)
        found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        told = found[3] if found else response.headers.get("Content-Length")
        tag, size = validator(response), None if told is None else int(told)
        self._tag = tag if self._tag is None else self._tag
        self._size = size if self._size is None else self._size
        is_next = response.status == 200 or (found and found[1] == str(self._position))
        if tag != self._tag or size not in (None, self._size) or not is_next:
            raise DataError(changed(self.name))
        skip = self._position if response.status == 200 else 0
        while skip:
            part = _take(response, min(skip, io.DEFAULT_BUFFER_SIZE))
            if not part:
                raise Transient("the transfer was interrupted")
            skip -= len(part)
        return response

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None


def _take(response: urllib3.BaseHTTPResponse, size: int) -> bytes:
    try:
        return response.read(size)
    except HTTPError as error:
        raise Transient(reason_of(error)) from None
