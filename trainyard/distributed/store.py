"""Opens torch's key-value store, by which ranks find each other."""

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.distributed.interfaces import server
from trainyard.distributed.launcher_variables import MeetingPoint
from trainyard.distributed.process_info import ProcessInfo, rank_name
from trainyard.errors import InputError, PeerError
from trainyard.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

START_S = 300
"""Seconds for which ranks wait for each other at the start; $TRAINYARD_START_S overrides it."""
_RETRY_S = 0.2
_CONNECT_S = 5
_STORE_S = 300  # for an answer of the store's server once connected
_SHARED = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "fuse", "cifs", "smb", "afs", "9p", "panfs")


def start_limit() -> float:
    """The limit in seconds. InputError if $TRAINYARD_START_S is no number."""
    text = os.environ.get("TRAINYARD_START_S", "")
    try:
        return float(text) if text else START_S
    except ValueError:
        raise InputError(f"TRAINYARD_START_S = {text!r} is not a number of seconds") from None


def open_stores(point: MeetingPoint, world: World, limit_s: float) -> tuple["Store", "Store"]:
    """Two connections to the store: for the training thread, which may block, and the watchdog.

    Rank 0 serves the store, unless a launcher's agent does. PeerError if there is no server within
    `limit_s`, InputError if there can be none.
    """
    from torch.distributed import PrefixStore

    if point.file is not None:
        first = second = _file_store(point.file, world)
    else:
        serves = world.is_first and not point.is_hosted
        first = _own_store(point, world) if serves else _store_of_first(point, world, limit_s)
        second = _store_of_first(point, world, limit_s)
    for store in (first, second):
        store.set_timeout(timedelta(seconds=_STORE_S))
    prefix = f"trainyard/{point.job}"
    return PrefixStore(prefix, first), PrefixStore(prefix, second)


def _file_store(path: Path, world: World) -> "Store":
    from torch.distributed import FileStore

    if not path.parent.is_dir():
        raise InputError(f"TRAINYARD_RENDEZVOUS: no such folder: {path.parent}")
    mounts = Path("/proc/self/mountinfo")  # not on macOS
    kind = file_system_of(path.parent, mounts.read_text() if mounts.exists() else "")
    if world.is_first and kind.startswith(_SHARED):
        sys.stderr.write(
            f"trainyard: {path} is on a network file system ({kind}), whose locks may make ranks "
            "wait for ever: better let them meet by MASTER_ADDR and MASTER_PORT\n"
        )
    return FileStore(str(path), world.size)


def file_system_of(folder: Path, mounts: str) -> str:
    """The type of a folder's file system, by `mounts` (/proc/self/mountinfo); "" if unknown."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for fields in (line.split() for line in mounts.splitlines()):
        if fields[2] == device:
            return fields[fields.index("-") + 1]
    return ""


def _own_store(point: MeetingPoint, world: World) -> "Store":
    from torch.distributed import TCPStore

    try:
        listening = server(point.host, point.port, for_others=world.num_nodes > 1)
    except OSError as error:
        raise InputError(
            f"{_me(world)} cannot listen at {point} ({error.strerror}): is another run using it, "
            "or a leftover process? Set MASTER_PORT to a free port, and MASTER_ADDR to an address "
            "of the host of rank 0"
        ) from None
    host = str(listening.getsockname()[0])
    return TCPStore(
        {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host),  # "::" accepts IPv4 too
        point.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _store_of_first(point: MeetingPoint, world: World, limit_s: float) -> "Store":
    from torch.distributed import TCPStore

    deadline = time.monotonic() + limit_s
    _wait_for_server(point, world, limit_s)
    opened: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            opened.append(TCPStore(point.host, point.port, wait_for_workers=False))

    # Torch waits for ever for an answer of a server other than its own.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(max(deadline - time.monotonic(), _CONNECT_S))
    if not opened:
        raise PeerError(
            f"the server that answers {_me(world)} at {point} is not rank 0: another service uses "
            "that port, or rank 0 has just ended; set MASTER_PORT to a free port"
        )
    return opened[0]


def _wait_for_server(point: MeetingPoint, world: World, limit_s: float) -> None:
    """Waits for the server; torch's own retries would print hundreds of lines."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((point.host, point.port), _CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{_me(world)} did not reach rank 0 at {point} within {limit_s:.0f} s: "
                    f"{cause_of(error)}"
                ) from None
            time.sleep(_RETRY_S)


def _me(world: World) -> str:
    return rank_name(world.rank, ProcessInfo.current())


def cause_of(error: OSError) -> str:
    """The cause in words, with advice."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror}); give its address by MASTER_ADDR"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (rank 0 was not started, has failed, or is on another host)"
    if isinstance(error, TimeoutError):
        return "no answer (a firewall, or an interface that does not lead there)"
    return str(error.strerror or error)
