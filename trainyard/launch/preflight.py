"""Checks before ranks start: all hosts have the same software, and reach the first host.

A `Doorbell` on the first host finds an address that all other hosts reach, and a free port.
"""

import hashlib
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from secrets import token_hex
from typing import Any

from trainyard.distributed.interfaces import local_address, server_for_all
from trainyard.installation import VERSION

_PACKAGE = Path(__file__).parents[1]
_REACH_S = 3
_TOKEN_BYTES = 16


# --- software ---


def installed() -> dict[str, str]:
    """Versions of trainyard and torch, and a checksum of Trainyard's code; imports neither."""
    return {"trainyard": VERSION, "torch": _version("torch"), "code": _checksum()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _checksum() -> str:
    """Digest of all modules and recipes, 12 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".toml")):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def differences(facts: Mapping[str, Mapping[str, str]], here: Mapping[str, str]) -> dict[str, str]:
    """Problems by host: code that differs from this host's, torch that differs from the first's.

    `facts`: what `installed` returns on each host.
    """
    first, torch = next(((host, each["torch"]) for host, each in facts.items()), ("", ""))
    problems = {}
    for host, each in facts.items():
        if each["trainyard"] != here["trainyard"]:
            versions = f"trainyard {each['trainyard']} there, {here['trainyard']} here"
            problems[host] = f"{versions}: install the same"
        elif each["code"] != here["code"]:
            problems[host] = (
                f"another code of trainyard {each['trainyard']} there ({each['code']}) than here "
                f"({here['code']}): install the same"
            )
        elif each["torch"] == "not installed":
            problems[host] = "torch is not installed there"
        elif each["torch"] != torch:
            problems[host] = f"torch {each['torch']} there, {torch} on {first}: install the same"
    return problems


def as_text(problems: Mapping[str, str], total: int) -> str:
    """The problems, one line per host."""
    lines = [f"host {host}: {problem}" for host, problem in problems.items()]
    if total == 1:
        return lines[0]
    verb = "is" if len(lines) == 1 else "are"
    return "\n  ".join(
        [f"{len(lines)} of {total} hosts {verb} not ready; nothing was started", *lines]
    )


# --- the meeting point ---


class Doorbell:
    """Listens at a free port of this host and sends a token to each connection."""

    def __init__(self) -> None:
        self._token = token_hex(_TOKEN_BYTES // 2)
        self._socket = server_for_all(0)
        threading.Thread(target=self._listen, daemon=True).start()

    def location(self, names: Sequence[str], towards: Sequence[str]) -> dict[str, Any]:
        """Port, token, and the names and addresses by which others may reach this host, best first.

        `names` are known to the launcher; `towards` are addresses of the others.
        """
        own = []
        for address in towards:
            with suppress(OSError):
                own.append(local_address(address))
        found = dict.fromkeys([*names, *own, socket.gethostname()])
        return {
            "port": self._socket.getsockname()[1],
            "token": self._token,
            "names": list(found),
        }

    def _listen(self) -> None:
        with suppress(OSError):  # the socket was closed
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):
                    connection.sendall(self._token.encode())

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # makes accept return
        self._socket.close()


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
