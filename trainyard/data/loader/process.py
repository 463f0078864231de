"""The loader process: reads and decodes samples, fills the ring, and ends with the trainer.

`Loader` starts it as `python -m trainyard.data.loader.process CHANNEL_FD MEMORY_FD`. It imports
no torch, so it starts in a fraction of a second and stays small. The loader process of streams
(`stream/process.py`) shares all but the source of batches.
"""

import multiprocessing.connection as mpc
import os
import queue
import resource
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from trainyard.data.index.table import load_index
from trainyard.data.loader.fill import SliceFiller
from trainyard.data.loader.result_sender import BatchTask, ResultSender, described, end_all, send
from trainyard.data.loader.ring import Ring, num_slices
from trainyard.data.loader.spec import AGAIN, LoaderSpec
from trainyard.data.reading.staged_copies import Copies
from trainyard.data.reading.stager import Stager
from trainyard.data.storage.credentials import adopt
from trainyard.printable import print_line

if TYPE_CHECKING:
    from concurrent.futures import Future

    Channel = mpc.Connection[Any, Any]

_PLANNED = 256  # samples of a rank that are planned together, or one batch
_MOST_AHEAD = 8192  # planned samples that are not yet handed to threads


Serve = Callable[["Channel", int, dict[str, Any]], None]
"""The work of a loader process, given the channel, the ring's memory and the spec."""


def run(channel_fd: int, memory_fd: int, serve: Serve) -> None:
    """Serve batches until the trainer closes the channel; never returns."""
    warnings.filterwarnings("ignore", module="PIL")  # odd metadata does not make an image bad
    Image.init()  # not in threads: one would miss formats that another is registering
    channel = mpc.Connection(channel_fd)
    try:
        spec = channel.recv()
        adopt(spec["credentials"])
        serve(channel, memory_fd, spec)
    except EOFError:
        pass  # the trainer closed the channel or died
    except Exception as error:
        send(channel, described(error))
    finally:
        os._exit(0)  # does not wait for threads, since nobody will read their batches


def _serve(channel: "Channel", memory_fd: int, spec: dict[str, Any]) -> None:
    config: LoaderSpec = spec["config"]
    path, fingerprint = spec["index"]
    index = load_index(Path(path))
    if index is None or index.fingerprint != fingerprint:
        raise FileNotFoundError(f"the index {path} was removed or replaced")
    ring = Ring(memory_fd, **spec["ring"])
    stager = Stager(index, config.stage, config.stage_gb) if config.stage else None
    _open_more_files()
    fill = SliceFiller(index, config, stager.copies if stager else None)
    sender = ResultSender(channel, config.threads)
    if stager is not None:
        stager.start().add_done_callback(partial(_staged, stager.copies, sender))
    fill_all(partial(_batches, config, fill), channel, ring, sender, threads=config.threads)


def _open_more_files() -> None:
    """Raises this process's limit of open files to its maximum, since shards stay open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _batches(config: LoaderSpec, fill: SliceFiller) -> Iterator[BatchTask]:
    """The batches in order; requests images of many more batches ahead if they are remote."""
    ahead: deque[BatchTask] = deque()
    samples = 0
    for batches in _planned(config, fill):
        ahead += batches
        samples += sum(batch.count for batch in batches)
        # Images in local copies are not requested, so the number of samples is a limit as well.
        while ahead and (fill.has_planned_enough() or samples > _MOST_AHEAD):
            batch = ahead.popleft()
            samples -= batch.count
            yield batch
    yield from ahead


def _planned(config: LoaderSpec, fill: SliceFiller) -> Iterator[list[BatchTask]]:
    """The batches in order. Small ones are planned several at a time, which halves the work."""
    plan, who = config.plan, (config.rank, config.size)
    together = max(1, _PLANNED * config.size // plan.global_batch)
    for first in range(config.start, config.stop, together):
        steps = range(first, min(first + together, config.stop))
        ids = [plan.batch(step, *who) for step in steps]
        epochs = [plan.epochs(step, *who) for step in steps]
        planned = fill.plan(np.concatenate(ids), np.concatenate(epochs))
        begins = [0, *accumulate(map(len, ids))]
        yield [
            BatchTask(len(part), partial(fill, planned, begin))
            for part, begin in zip(ids, begins, strict=False)
        ]


def fill_all(
    one_pass: Callable[[], Iterable[BatchTask]],
    channel: "Channel",
    ring: Ring,
    sender: ResultSender,
    *,
    threads: int,
) -> None:
    """Hands each batch of a pass to threads as soon as a slot is free, until the trainer ends.

    After a pass it waits: the trainer asks for another one, or ends.
    """
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    again: queue.SimpleQueue[int] = queue.SimpleQueue()
    slices: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(channel, free, again), daemon=True)
    listener.start()
    for _ in range(threads):
        threading.Thread(target=_fill, args=(slices,), daemon=True).start()
    try:
        while True:
            for work in one_pass():
                slot = free.get()  # waits here while the trainer is behind
                parts = _slices(work.count, threads)
                batch = sender.begin(slot, work, len(parts))
                for number, part in enumerate(parts):
                    slices.put(partial(sender.fill, batch, number, ring.slots[slot], part))
            again.get()
    except Exception as error:
        sender.fail(error)
    listener.join()


def _fill(slices: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        slices.get()()


def _listen(
    channel: "Channel", free: "queue.SimpleQueue[int]", again: "queue.SimpleQueue[int]"
) -> None:
    """Receives free slots and requests for another pass.

    When the trainer ends, this process ends too, whatever it waits for.
    """
    try:
        while True:
            message = channel.recv_bytes()[0]
            (again if message == AGAIN else free).put(message)
    except (EOFError, OSError):
        end_all()


def _staged(copies: Copies, sender: ResultSender, done: "Future[str | None]") -> None:
    """Reports the end of staging; an error is announced like a batch."""
    error = done.exception()
    if error is not None:
        sender.fail(error)
    elif done.result() is not None and copies.is_news():
        print_line(f"{done.result()}")


def _slices(count: int, threads: int) -> list[slice]:
    """Near-equal slices that cover range(count)."""
    slices = num_slices(count, threads)
    borders = [count * part // slices for part in range(slices + 1)]
    return [slice(a, b) for a, b in pairwise(borders) if a < b]


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), _serve)
