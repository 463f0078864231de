"""Opens torch's key-value store, by which ranks find each other."""

import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from trainyard.distributed.interfaces import server
from trainyard.distributed.launcher_variables import MeetingPoint
from trainyard.distributed.process_info import ProcessInfo
from trainyard.errors import InputError, PeerError
from trainyard.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

START_S = 300
"""Seconds for which ranks wait for each other at the start; $TRAINYARD_START_S overrides it."""
_RETRY_S = 0.2
_CONNECT_S = 5
_ANSWER_S = 300  # for a value that another rank sets, beyond the limit of the start


def start_limit() -> float:
    """The limit in seconds. InputError if $TRAINYARD_START_S is no number."""
    text = os.environ.get("TRAINYARD_START_S", "")
    try:
        return float(text) if text else START_S
    except ValueError:
        raise InputError("variable.not-seconds", name="TRAINYARD_START_S", value=text) from None


def open_stores(point: MeetingPoint, world: World, limit_s: float) -> tuple["Store", "Store"]:
    """Two connections to the store: for the training thread, which may block, and the watchdog.

    Rank 0 serves the store, unless torchrun's agent does, whose store outlives a restart. PeerError
    if there is no server within `limit_s`, InputError if there can be none.
    """
    from torch.distributed import PrefixStore

    serves = world.is_first and not point.is_hosted
    first = _own_store(point, world) if serves else _store_of_first(point, world, limit_s)
    second = _store_of_first(point, world, limit_s)
    # torchrun counts its starts. Agents of Trainyard, which share no store, may disagree on that.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if point.is_hosted else "0"
    for store in (first, second):
        store.set_timeout(timedelta(seconds=limit_s + _ANSWER_S))
    prefix = f"trainyard/{point.job}/{attempt}"
    return PrefixStore(prefix, first), PrefixStore(prefix, second)


def _own_store(point: MeetingPoint, world: World) -> "Store":
    from torch.distributed import TCPStore

    try:
        listening = server(point.host, point.port, for_others=world.num_nodes > 1)
    except OSError as error:
        me = ProcessInfo.current()
        raise InputError(
            "rank.cannot-listen",
            "rank {rank} ({host}, process {pid}) cannot listen at {address} ({reason}): is "
            "another run using it, or a leftover process? Set MASTER_PORT to a free port, and "
            "MASTER_ADDR to an address of the host of rank 0",
            rank=world.rank,
            host=me.host,
            pid=me.pid,
            address=str(point),
            reason=error.strerror,
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
    """Waits for the server; torch's own retries would print a hundred lines."""
    from torch.distributed import TCPStore

    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((point.host, point.port), _CONNECT_S).close()
            return TCPStore(point.host, point.port, wait_for_workers=False)
        except OSError as error:
            if time.monotonic() > deadline:
                me = ProcessInfo.current()
                raise PeerError(
                    "rank.first-rank-unreachable",
                    "rank {rank} ({host}, process {pid}) did not reach rank 0 at {address} within "
                    "{limit_s:.0f} s: {reason}",
                    rank=world.rank,
                    host=me.host,
                    pid=me.pid,
                    address=str(point),
                    limit_s=limit_s,
                    reason=error.strerror or str(error),
                ) from None
            time.sleep(_RETRY_S)
