"""Run a function as N ranks joined by gloo on this machine, and get back what each returned."""

import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from trainyard.world import World, member

# The heavy imports are done once, in the fork server, not once per rank.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "timm", "trainyard.run"])


def spawn(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """The results of `function(world, *args)` on ranks 0 … size-1, in order of rank.

    `function` is a module's own, arguments and results are picklable. An exception in any rank
    is raised here with its traceback; ranks that hang are killed.
    """
    results: Any = _CONTEXT.Queue()
    port = _free_port()
    ranks = [
        _CONTEXT.Process(target=_rank, args=(function, rank, size, port, results, args))
        for rank in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        return _collect(results, ranks, time.monotonic() + timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _collect(results: Any, ranks: list[Any], deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        try:
            rank, value, error = results.get(timeout=1)
        except queue.Empty:
            dead = [n for n, p in enumerate(ranks) if p.exitcode and n not in found]
            assert not dead, f"ranks {dead} died without a word"
            assert time.monotonic() < deadline, f"ranks {set(range(len(ranks))) - set(found)} hang"
            continue
        assert error is None, f"rank {rank} failed:\n{error}"
        found[rank] = value
    return [found[rank] for rank in range(len(ranks))]


def _rank(
    function: Callable[..., Any], rank: int, size: int, port: int, results: Any, args: Any
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    try:
        with member(world):
            results.put((rank, function(world, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
