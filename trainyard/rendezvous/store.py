"""Torch's key-value store, through which ranks find each other."""

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.errors import InputError, PeerError
from trainyard.rendezvous.discovery import MeetingPoint
from trainyard.rendezvous.interfaces import server
from trainyard.rendezvous.place import Place
from trainyard.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

START_S = 300
"""How long ranks wait for each other at the start; $TRAINYARD_START_S sets another."""
_RETRY_S = 0.2
_CONNECT_S = 5
_STORE_S = 300  # for an answer of the store's server, once there is one
_SHARED = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "fuse", "cifs", "smb", "afs", "9p", "panfs")


def start_limit() -> float:
    """Seconds. InputError if $TRAINYARD_START_S is no number."""
    text = os.environ.get("TRAINYARD_START_S", "")
    try:
        return float(text) if text else START_S
    except ValueError:
        raise InputError(f"TRAINYARD_START_S = {text!r} is no number of seconds") from None


def open_store(point: MeetingPoint, world: World, limit_s: float) -> "Store":
    """This rank's connection; of the first rank the server too, where no agent serves.

    PeerError if there is no server within `limit_s`, InputError if there can be none.
    """
    from torch.distributed import PrefixStore

    if point.file is not None:
        store = _file_store(point.file, world)
    elif world.is_first and not point.is_hosted:
        store = _own_store(point, world)
    else:
        store = _store_of_first(point, world, limit_s)
    store.set_timeout(timedelta(seconds=_STORE_S))
    return PrefixStore(f"trainyard/{point.job}", store)


def _file_store(path: Path, world: World) -> "Store":
    from torch.distributed import FileStore

    if not path.parent.is_dir():
        raise InputError(f"TRAINYARD_RENDEZVOUS: there is no folder {path.parent}")
    kind = file_system_of(path.parent, Path("/proc/self/mountinfo").read_text())
    if world.is_first and kind.startswith(_SHARED):
        sys.stderr.write(
            f"trainyard: {path} is on a network file system ({kind}), whose locks may make ranks "
            "wait for ever: better let them meet by MASTER_ADDR and MASTER_PORT\n"
        )
    return FileStore(str(path), world.size)


def file_system_of(folder: Path, mounts: str) -> str:
    """Of which kind it is, by the mounts as /proc/self/mountinfo has them; "" if unknown."""
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
            f"rank 0 ({Place.mine()}) cannot listen at {point} ({error.strerror}): is another run "
            "there, or what is left of one? Set MASTER_PORT to a free port, and MASTER_ADDR to an "
            "address of the host of rank 0"
        ) from None
    host = str(listening.getsockname()[0])
    return TCPStore(
        {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host),  # "::" takes IPv4 too
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

    # Torch waits for ever for the answer of a server that is none of its own.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(max(deadline - time.monotonic(), _CONNECT_S))
    if not opened:
        raise PeerError(
            f"what answers rank {world.rank} ({Place.mine()}) at {point} is not rank 0: another "
            "service has that port, or rank 0 has just ended; set MASTER_PORT to a free one"
        )
    return opened[0]


def _wait_for_server(point: MeetingPoint, world: World, limit_s: float) -> None:
    """Torch would try by itself, and say so in hundreds of lines."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((point.host, point.port), _CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"rank {world.rank} ({Place.mine()}) did not reach rank 0 at {point} within "
                    f"{limit_s:.0f} s: {cause_of(error)}"
                ) from None
            time.sleep(_RETRY_S)


def cause_of(error: OSError) -> str:
    """In words, with what to do."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror}); give its address by MASTER_ADDR"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (rank 0 was not started, has failed, or is on another host)"
    if isinstance(error, TimeoutError):
        return "no answer (a firewall, or an interface that does not lead there)"
    return str(error.strerror or error)
