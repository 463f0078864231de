"""Join the other ranks of a run, and leave them at the end."""

import os
import resource
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainyard.distributed.interfaces import use_interface_to
from trainyard.distributed.launcher_variables import meeting_point
from trainyard.distributed.process_info import ProcessInfo
from trainyard.distributed.startup_check import check_start
from trainyard.distributed.store import open_stores, start_limit
from trainyard.distributed.watchdog import Watchdog
from trainyard.errors import PeerError, TrainyardError
from trainyard.parent import put_back_handlers
from trainyard.world import NO_LIMIT, World, gpu_of, own_device

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

_NO_FACTS: Mapping[str, str] = MappingProxyType({})
OWN_FILES = 512
"""Files open at a time: shards, logs, libraries, a checkpoint."""
FILES_PER_RANK = 4
"""Connections to each other rank, by gloo in several groups."""
_MESH = (
    64  # ranks, of which each connects to all others at the start: none finds a way closed later
)


@contextmanager
def init_distributed(world: World, facts: Mapping[str, str] = _NO_FACTS) -> Iterator[Watchdog]:
    """Inside, this rank is one of the process group of all ranks, and a watchdog runs.

    `facts`: what must be the same on every rank, by name. Within $TRAINYARD_START_S either all
    ranks are in, or an error says which are missing, or which differ in what. Until then there is
    nothing to save, and a signal ends the process at once, as it does by default.
    """
    if world.size == 1:
        watchdog = Watchdog()
        try:
            yield watchdog
        finally:
            watchdog.close()
        return

    import torch.distributed as dist

    with _killed_by_interrupt():
        watchdog, failed = _join(world, facts), True
        try:
            with watchdog.attributing_errors():
                yield watchdog
            failed = False
        except Exception as error:
            failed = not getattr(error, "is_shared", False)
            raise
        finally:
            watchdog.close(failed=failed)
            if not failed:  # else gloo may wait for ever for the rest of a message cut short
                dist.destroy_process_group()


@contextmanager
def _killed_by_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C kills the process until training handles signals.

    Python's handler would wait for torch to return from a rendezvous that the other ranks have
    left. Only the main thread can set a handler; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        put_back_handlers({signal.SIGINT: before})


def _join(world: World, facts: Mapping[str, str]) -> Watchdog:
    from torch.distributed import PrefixStore

    point, limit_s = meeting_point(world), start_limit()
    _allow_files(OWN_FILES + FILES_PER_RANK * world.size)
    device, gpu = _own_device(world)
    store, watched = open_stores(point, world, limit_s)
    start = check_start(store, world, facts, point=point, limit_s=limit_s)
    use_interface_to(start.address)
    watchdog = Watchdog(
        PrefixStore("watchdog", watched),
        world,
        start.processes,
        is_hosted=point.is_hosted,
    )
    try:
        with watchdog.attributing_errors():
            own_store = PrefixStore("group", store)
            has_nccl = _has_each_a_gpu(own_store, world, gpu)
            _make_group(own_store, world, limit_s, device if has_nccl else None)
    except RuntimeError as error:
        watchdog.close(failed=True)
        first_line, me = f"{error}".partition("\n")[0], ProcessInfo.current()
        raise PeerError(
            "rank.cannot-connect",
            "rank {rank} ({host}, process {pid}) cannot connect to all others by the interface "
            "{interface}: set GLOO_SOCKET_IFNAME to the one that leads to them, and open all "
            "ports between the hosts ({reason})",
            rank=world.rank,
            host=me.host,
            pid=me.pid,
            interface=os.environ.get("GLOO_SOCKET_IFNAME", "of its name"),
            reason=first_line,
        ) from error
    return watchdog


def _own_device(world: World) -> tuple["torch.device", str | None]:
    """This rank's device and the id of its GPU. TrainyardError, before ranks meet, if it fails."""
    try:
        device = own_device(world)
        return device, gpu_of(device)
    except RuntimeError as error:
        first_line, me = f"{error}".partition("\n")[0], ProcessInfo.current()
        raise TrainyardError(
            "rank.gpu-failed",
            "rank {rank} ({host}, process {pid}) cannot use its GPU: {reason}",
            rank=world.rank,
            host=me.host,
            pid=me.pid,
            reason=first_line,
        ) from error


def _make_group(
    store: "Store", world: World, limit_s: float, device: "torch.device | None"
) -> None:
    """The group of all ranks: with NCCL if each has a GPU of its own, to which it is bound."""
    import torch
    from torch import distributed as dist

    if world.size > _MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connections as they are needed
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=limit_s),
        # Else torch guesses, by LOCAL_RANK or by the rank among those of all hosts.
        device_id=device,
    )
    if world.size > _MESH:
        dist.all_reduce(torch.zeros(1))  # a ring: while there is a limit
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(NO_LIMIT, dist.group.WORLD)


def _has_each_a_gpu(store: "Store", world: World, gpu: str | None) -> bool:
    """True if each rank has a GPU of its own, which NCCL needs."""
    store.set(f"gpu/{world.rank}", gpu or "")
    if world.is_first:
        gpus = {*store.multi_get([f"gpu/{rank}" for rank in range(world.size)])}
        store.set("each has a GPU", f"{len(gpus - {b''}) == world.size}")
    return store.get("each has a GPU") == b"True"


def _allow_files(number: int) -> None:
    """Raise the limit of open files, as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))
