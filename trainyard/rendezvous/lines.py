"""Connections between the first rank and each of the others, for messages beside torch's."""

import json
import socket
from contextlib import suppress
from typing import Any

from trainyard.rendezvous.place import Place

# What the kernel asks over a line that is silent: a host that has lost power is missed after 10 s.
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 4,  # s
    socket.TCP_KEEPINTVL: 2,  # s
    socket.TCP_KEEPCNT: 3,
}
_UNSENT_MS = 10_000  # nor does a message wait longer for its receipt
_LONGEST = 1 << 16  # bytes of a message
_NOT_KNOWN = Place("?", "", 0, "")


class Line:
    """Messages, each a JSON value, to and from the rank at the other end."""

    def __init__(
        self, connection: socket.socket, rank: int = -1, place: Place = _NOT_KNOWN
    ) -> None:
        self.rank, self.place = rank, place
        self._connection, self._received = connection, b""
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_MS)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def own_address(self) -> str:
        """This machine's, as the other end has it."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Any) -> None:
        """In silence if the other end is gone: that is heard when listening."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Any] | None:
        """The messages that have come, of one that can be read from; None if it broke.

        ValueError if something else has come.
        """
        try:
            data = self._connection.recv(_LONGEST)
        except OSError:
            data = b""
        if not data:
            return None
        *messages, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _LONGEST:
            raise ValueError("no end of a message")
        return [json.loads(message) for message in messages]

    def wait(self, seconds: float) -> Any:
        """The next message, and not a byte of those after it; None if the line broke.

        TimeoutError if it does not come, ValueError if something else comes.
        """
        self._connection.settimeout(seconds)
        received = b""
        try:
            while not received.endswith(b"\n"):
                seen = self._connection.recv(_LONGEST, socket.MSG_PEEK)
                received += self._connection.recv(seen.find(b"\n") + 1 or len(seen))
                if not seen:
                    return None
        except TimeoutError:
            raise
        except OSError:
            return None
        finally:
            self._connection.settimeout(None)
        return json.loads(received)

    def close(self) -> None:
        self._connection.close()

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.place})"
