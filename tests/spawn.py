"""Run a function as N ranks joined by gloo on this machine, and get back what each returned."""

import faulthandler
import multiprocessing
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tests import loaders
from tests.web import free_port
from trainyard.config import RunConfig
from trainyard.distributed import Watchdog, init_distributed
from trainyard.files import WRITER, RunDirectory
from trainyard.monitor.outcome import Outcome
from trainyard.run import trainer
from trainyard.world import World

# The heavy imports are done once, in the fork server, not once per rank.
_CONTEXT = multiprocessing.get_context("forkserver")
_LATE = ("timm.optim", "torch.utils.serialization", "numpy.ma", "PIL.JpegImagePlugin")  # by a run
_CONTEXT.set_forkserver_preload(
    ["pytest", "torch", "timm", "trainyard.run.trainer", *_LATE, *loaders.MODULES, __name__]
)
if "OMP_NUM_THREADS" in os.environ:  # else training sets the number, here and in forked processes
    torch.set_num_threads(1)


def spawn(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """The results of `function(world, *args)` on ranks 0 … size-1, in order of rank.

    `function` is a module's own, arguments and results are picklable. An exception in any rank
    is raised here with its traceback; ranks that hang are killed.
    """
    results: Any = _CONTEXT.Queue()
    with _ranks(_rank, size, function, results, args) as ranks:
        return _collect(results, ranks, time.monotonic() + timeout_s)


def launch(function: Callable[..., None], size: int, *args: Any) -> list[int]:
    """How ranks ended, their exit codes, that ran `function(world, *args)` and are to join there.

    The environment says which rank a process is, as a launcher's would.
    """
    with _ranks(_launched, size, function, args) as ranks:
        for process in ranks:
            process.join(timeout=100)
        return [process.exitcode for process in ranks]


def end_by(number: int) -> None:
    """A signal to this process once the checkpoint under way is written, so that it has one."""
    wait_for_writer()
    os.kill(os.getpid(), number)


def wait_for_writer() -> None:
    """Wait until the checkpoint under way is written."""
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()


@contextmanager
def _ranks(target: Callable[..., None], size: int, *args: Any) -> Iterator[list[Any]]:
    """A process for each rank, which runs `target(world, port, *args)`; none is left behind."""
    port = str(free_port())
    worlds = [World(rank=rank, size=size, local_rank=rank, local_size=size) for rank in range(size)]
    ranks: list[Any] = [
        _CONTEXT.Process(target=target, args=(world, port, *args)) for world in worlds
    ]
    try:
        for process in ranks:
            process.start()
        yield ranks
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
    world: World, port: str, function: Callable[..., Any], results: Any, args: tuple[Any, ...]
) -> None:
    faulthandler.enable()  # a crash has its stacks in CI's output
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    try:
        with init_distributed(world):
            results.put((world.rank, function(world, *args), None))
    except BaseException:
        results.put((world.rank, None, traceback.format_exc()))


def _launched(
    world: World, port: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (world.rank, world.rank, world.size, world.size, "127.0.0.1", port)
    os.environ |= dict(zip(names, map(str, values), strict=True))
    torch.set_num_threads(1)
    function(world, *args)


def train_joined(config: RunConfig, folder: Path, world: World) -> Outcome:
    """Train as one of ranks that have joined already."""
    loaders.install_in_fork()
    console, watchdog = Console(quiet=True), Watchdog(world=world)
    try:
        return trainer.train_joined(
            config, RunDirectory(folder), world, console=console, watchdog=watchdog
        )
    finally:
        watchdog.close()
