"""The meeting point of ranks: a port and an address of the first host that all others reach."""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from secrets import token_hex
from typing import Any

from trainyard.distributed.interfaces import local_address, server_for_all

_REACH_S = 3
_TOKEN_BYTES = 16


class Doorbell:
    """Listens at a free port of this host and sends a token to each connection."""

    def __init__(self) -> None:
        self._token = token_hex(_TOKEN_BYTES // 2).encode()
        self._socket = server_for_all(0)
        threading.Thread(target=self._listen, daemon=True).start()

    def as_found(self, names: Sequence[str], towards: Sequence[str]) -> dict[str, Any]:
        """Port, token, and the names and addresses by which others may reach this host, best first.

        `names` are known to the launcher; `towards` are addresses of the others.
        """
        port = self._socket.getsockname()[1]
        found = [*names, *_own_addresses(towards), socket.gethostname()]
        return {"port": port, "token": self._token.decode(), "names": list(dict.fromkeys(found))}

    def _listen(self) -> None:
        with suppress(OSError):  # the socket was closed
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):
                    connection.sendall(self._token)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # makes accept return
        self._socket.close()


def free_port() -> int:
    """A port of this host that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _own_addresses(towards: Sequence[str]) -> list[str]:
    """Addresses of this host on its way to others."""
    found = []
    for address in towards:
        with suppress(OSError):
            found.append(local_address(address))
    return found


def reached(names: Sequence[str], port: int, token: str) -> dict[str, Any]:
    """The addresses that lead to the doorbell with the token, and why the others do not."""

    def ring(name: str) -> tuple[str, str]:
        try:
            with socket.create_connection((name, port), _REACH_S) as connection:
                answer = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
                address = connection.getpeername()[0]
        except OSError as error:
            return "", f"{name}: {error.strerror or 'no answer'}"
        return (address, "") if answer == token.encode() else ("", f"{name}: another machine")

    with ThreadPoolExecutor(max(len(names), 1)) as pool:
        rung = list(pool.map(ring, names))
    return {
        "addresses": [address for address, _ in rung if address],
        "problems": [problem for _, problem in rung if problem],
    }
