"""To be one of several ranks: join the others, and leave them at the end."""

import os
import resource
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainyard.errors import PeerError
from trainyard.rendezvous.discovery import meeting_point
from trainyard.rendezvous.interfaces import use_interface_to
from trainyard.rendezvous.place import Place
from trainyard.rendezvous.roll_call import call_roll
from trainyard.rendezvous.store import open_store, start_limit
from trainyard.rendezvous.watch import Watch
from trainyard.world import NO_LIMIT, World, gpu_of, is_lost_peer, opening, own_device

if TYPE_CHECKING:
    from torch.distributed import Store

_NO_FACTS: Mapping[str, str] = MappingProxyType({})
_LEAVE_S = 5
OWN_FILES = 512
"""Open at a time: shards, logs, libraries, a checkpoint."""
FILES_PER_RANK = 4
"""Connections to each other rank, by gloo in several groups."""


@contextmanager
def member(world: World, facts: Mapping[str, str] = _NO_FACTS) -> Iterator[Watch]:
    """Join the other ranks, and leave them at the end; inside, a lost one is heard of.

    `facts`: what must be the same on every rank, by name. Within $TRAINYARD_START_S either all
    ranks are in, or an error says which are missing, or which differ in what. Until then there is
    nothing to save, and a signal ends the process at once, as it does by default.
    """
    if world.size == 1:
        watch = Watch()
        try:
            yield watch
        finally:
            watch.close(in_peace=True)
        return

    with _killed_by_interrupt():
        watch, in_peace = _join(world, facts), False
        try:
            yield watch
            in_peace = True
        except Exception as error:
            in_peace = getattr(error, "is_shared", False)
            if is_lost_peer(error):
                watch.alarm()
                raise _lost(watch) from error
            raise
        finally:
            watch.close(in_peace=in_peace)
            _leave_group(in_peace=in_peace and not watch.has_alarm)


def _leave_group(*, in_peace: bool) -> None:
    """Of a message that was cut short gloo waits for the rest, for ever: then in another thread."""
    import torch.distributed as dist

    if in_peace:
        dist.destroy_process_group()
        return
    leave = threading.Thread(target=dist.destroy_process_group, name="leave", daemon=True)
    leave.start()
    leave.join(_LEAVE_S)


@contextmanager
def _killed_by_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C kills until training takes the signals.

    Python's own handler would wait for torch to come back from a rendezvous that the other ranks
    have already left. Only a process's first thread may say so: others are left as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _lost(watch: Watch) -> PeerError:
    """Of which all hear, so that the first one may tell for all if it is left."""
    error = PeerError(watch.reason)
    error.is_shared = bool(watch.lost) and not watch.lost[0].startswith("rank 0 ")
    return error


def _join(world: World, facts: Mapping[str, str]) -> Watch:
    point, limit_s = meeting_point(world), start_limit()
    _allow_files(OWN_FILES + FILES_PER_RANK * world.size)
    with opening():
        store = open_store(point, world, limit_s)
        roll = call_roll(store, world, facts, point=point, limit_s=limit_s)
        use_interface_to(roll.address)
        watch = Watch(roll.lines, world)
        try:
            _make_group(store, f"group/{roll.number}", world, limit_s)
        except RuntimeError as error:
            raise _disconnected(error, watch, world) from error
    return watch


def _make_group(store: "Store", prefix: str, world: World, limit_s: float) -> None:
    """The group of all ranks: with NCCL where each has a GPU of its own, to which it is bound."""
    from torch import distributed as dist

    device, own_store = own_device(world), dist.PrefixStore(prefix, store)
    has_nccl = _has_each_a_gpu(own_store, world, gpu_of(device))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        store=own_store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=limit_s),
        # Else torch guesses, by LOCAL_RANK or by the rank among those of all hosts.
        device_id=device if has_nccl else None,
    )
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(NO_LIMIT, dist.group.WORLD)


def _has_each_a_gpu(store: "Store", world: World, gpu: str | None) -> bool:
    """Whether each rank has a GPU of its own: NCCL works with nothing else."""
    store.set(f"gpu/{world.rank}", gpu or "")
    if world.is_first:
        gpus = {store.get(f"gpu/{rank}") for rank in range(world.size)}
        store.set("each has a GPU", f"{len(gpus - {b''}) == world.size}")
    return store.get("each has a GPU") == b"True"


def _disconnected(error: RuntimeError, watch: Watch, world: World) -> PeerError:
    """Why there is no group, after all were there."""
    if is_lost_peer(error):
        watch.alarm()
    first_line = f"{error}".partition("\n")[0]
    watch.close(in_peace=False)
    if watch.lost:
        return _lost(watch)
    return PeerError(
        f"rank {world.rank} ({Place.mine()}) cannot connect to all others by the interface "
        f"{os.environ.get('GLOO_SOCKET_IFNAME', 'of its name')}: set GLOO_SOCKET_IFNAME to the one "
        f"that leads to them, and open all ports between the hosts ({first_line})"
    )


def _allow_files(number: int) -> None:
    """As far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))
