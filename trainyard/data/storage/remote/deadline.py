"""Connections that abort an answer that arrives too slowly.

A socket's own timeout bounds the wait for the next packet, so a server that sends a byte now and
then would hold a request for ever. Here the head of an answer has `GRACE_S` seconds in all, and its
body may fall behind `FLOOR` bytes a second by as many seconds. Only waits for the server count,
so a reader may be slow.
"""

import io
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPResponse
from typing import TYPE_CHECKING, Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

if TYPE_CHECKING:
    import socket

    from _typeshed import WriteableBuffer

GRACE_S = 60.0
FLOOR = 10_000  # bytes a second

_until: ContextVar[float] = ContextVar("until", default=math.inf)


class TooSlow(TimeoutError):
    """An answer arrives more slowly than `FLOOR`, or not within the time of `no_longer_than`."""

    def __init__(self, received: int, seconds: float) -> None:
        super().__init__(f"the server sent {received:,} bytes in {seconds:.1f} s, too slowly")


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Ends requests of this thread inside the block with a timeout after `seconds`."""
    token = _until.set(min(_until.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _until.reset(token)


class Deadline:
    """The remaining time of one answer. Waiting for bytes uses it up; received bytes add to it.

    `floor` is infinite for the head of an answer: its bytes add no time.
    """

    def __init__(self, longest_wait_s: float) -> None:
        self._longest_wait_s = longest_wait_s  # for a single packet
        self._left_s = GRACE_S
        self._received, self._waited_s = 0, 0.0
        self.floor = math.inf

    def receive(
        self,
        sock: "socket.socket",
        receive: "Callable[[WriteableBuffer], int | None]",
        buffer: "WriteableBuffer",
    ) -> int:
        """The number of bytes that `receive` puts into a buffer; 0 at the end of the connection.

        TimeoutError if no bytes arrive in time, `TooSlow` if the time of the answer is up.
        """
        began = time.monotonic()
        left_s = min(self._left_s, _until.get() - began)
        if left_s <= 0:
            raise self._too_slow(0.0)
        sock.settimeout(min(self._longest_wait_s, left_s))
        try:
            count = receive(buffer) or 0
        except TimeoutError:
            if left_s >= self._longest_wait_s:
                raise TimeoutError from None
            raise self._too_slow(time.monotonic() - began) from None
        waited_s = time.monotonic() - began
        self._received += count
        self._waited_s += waited_s
        self._left_s = min(GRACE_S, self._left_s - waited_s + count / self.floor)
        return count

    def _too_slow(self, last_s: float) -> TooSlow:
        return TooSlow(self._received, self._waited_s + last_s)


class _Received(io.RawIOBase):
    """The bytes of one answer from a socket of urllib3."""

    def __init__(self, sock: "socket.socket") -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self.clock = Deadline(sock.gettimeout() or GRACE_S)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        return self.clock.receive(self._sock, self._raw.readinto, buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: "socket.socket", *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self._received = _Received(sock)
        self.fp = io.BufferedReader(self._received)

    def begin(self) -> None:
        super().begin()
        if self.status in (200, 206):
            self._received.clock.floor = FLOOR


class _Connection(HTTPConnection):
    response_class = _Response


class _SecureConnection(HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


def bounded(manager: urllib3.PoolManager) -> urllib3.PoolManager:
    """The same manager; its requests now abort answers that arrive too slowly."""
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    return manager
