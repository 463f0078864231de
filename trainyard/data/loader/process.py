"""The loader process: reads and decodes samples, fills the ring, and ends with the trainer.

`Loader` starts it as `python -m trainyard.data.loader.process CHANNEL_FD MEMORY_FD`. It imports
no torch, so it starts in a fraction of a second and stays small. The loader process of streams
(`stream/process.py`) shares all but the source of batches.
"""

import json
import multiprocessing.connection as mpc
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from trainyard.data.batch import BadSample, HostBatch
from trainyard.data.index.table import load_index
from trainyard.data.loader.fill import SliceFiller
from trainyard.data.loader.ring import Ring, num_slices
from trainyard.data.loader.spec import AGAIN, LoaderSpec
from trainyard.data.reading.staging import StagedShards
from trainyard.data.storage.credentials import adopt
from trainyard.errors import DataError
from trainyard.printable import print_line

if TYPE_CHECKING:
    Channel = mpc.Connection[Any, Any]

_PLANNED = 256  # samples of a rank that are planned together, or one batch
_MOST_AHEAD = 8192  # planned samples that are not yet handed to threads


@dataclass(frozen=True)
class BatchTask:
    """A batch to be filled."""

    count: int  # samples
    fill: Callable[[HostBatch, slice], list[BadSample]]  # called in threads, once for each slice
    is_last: bool = False  # of a pass over a stream


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
    staged = StagedShards(index, config.stage, config.stage_gb) if config.stage else None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # since shards stay open
    fill = SliceFiller(index, config, staged)
    results = Results(channel, config.threads)
    if staged is not None:
        staged.start().add_done_callback(partial(_staged, results))
    fill_all(partial(_batches, config, fill), channel, ring, results)


def _batches(config: LoaderSpec, fill: SliceFiller) -> Iterator[BatchTask]:
    """The batches in order; images of many more batches are read ahead from slow storage."""
    ahead: deque[BatchTask] = deque()
    samples = 0
    try:
        for batches in _planned(config, fill):
            ahead += batches
            samples += sum(batch.count for batch in batches)
            # Images in the page cache are not read ahead: the number of samples is a limit as well.
            while ahead and (fill.has_planned_enough() or samples > _MOST_AHEAD):
                batch = ahead.popleft()
                samples -= batch.count
                yield batch
    except Exception:  # an error comes after the batches before it
        yield from ahead
        raise
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
            BatchTask(len(part), partial(planned, begin))
            for part, begin in zip(ids, begins, strict=False)
        ]


def fill_all(
    one_pass: Callable[[], Iterable[BatchTask]], channel: "Channel", ring: Ring, results: "Results"
) -> None:
    """Hands each batch of a pass to threads as soon as a slot is free, until the trainer ends.

    After a pass it waits: the trainer asks for another one, or ends.
    """
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    again: queue.SimpleQueue[int] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(channel, free, again), daemon=True)
    listener.start()
    pool = ThreadPoolExecutor(results.threads)
    try:
        while True:
            for task in one_pass():
                slot = free.get()  # waits here while the trainer is behind
                parts = _slices(task.count, results.threads)
                work = partial(_timed, task.fill, ring.slots[slot])
                results.announce(slot, task, [pool.submit(work, part) for part in parts])
            again.get()
    except Exception as error:
        results.fail(error)
    listener.join()


_Slice = tuple[list[BadSample], float]
"""What came of a slice: its bad samples, and the seconds that it took."""


def _timed(
    fill: Callable[[HostBatch, slice], list[BadSample]], slot: HostBatch, part: slice
) -> _Slice:
    begun = time.perf_counter()
    return fill(slot, part), time.perf_counter() - begun


class Results:
    """Announces batches to the trainer, in order.

    The thread that fills a batch's last slice sends the message; a separate thread would have to be
    woken for every batch.
    """

    def __init__(self, channel: "Channel", threads: int) -> None:
        self.threads = threads
        self._channel = channel
        self._pending: deque[tuple[int, BatchTask, Sequence[Future[_Slice]]]] = deque()
        self._lock = threading.Lock()

    def announce(self, slot: int, task: BatchTask, slices: Sequence["Future[_Slice]"]) -> None:
        """Sends the message about a batch when its slices, and all batches before, are filled."""
        with self._lock:
            self._pending.append((slot, task, slices))
        for each in slices:
            each.add_done_callback(self._send_finished)
        if not slices:  # a rank's share of a short batch may be empty
            self._send_finished()

    def fail(self, error: BaseException) -> None:
        """Announces an error after all batches so far, and ends the process."""
        failed: Future[_Slice] = Future()
        failed.set_exception(error)
        self.announce(0, BatchTask(0, lambda slot, part: []), [failed])

    def _send_finished(self, _: object = None) -> None:
        with self._lock:
            while self._pending and all(each.done() for each in self._pending[0][2]):
                slot, task, slices = self._pending.popleft()
                try:
                    filled = [each.result() for each in slices]
                except Exception as error:
                    send(self._channel, described(error))
                    os._exit(1)
                send(self._channel, announcement(slot, task, filled, self.threads))


def announcement(
    slot: int, task: BatchTask, slices: Sequence[_Slice], threads: int
) -> dict[str, Any]:
    """The message about a batch."""
    seconds = sum(seconds for _, seconds in slices)
    return {
        "slot": slot,
        "count": task.count,
        "is_last": task.is_last,
        "bad": [row for bad, _ in slices for row in bad],
        "capacity": task.count * threads / seconds if seconds else 0.0,
    }


def described(error: BaseException) -> dict[str, Any]:
    """The message about an error: code and fields of a DataError, else a traceback."""
    if isinstance(error, DataError):  # the whole data set fails, say because a server is gone
        return {"data_error": error.packed()}
    return {"error": "".join(traceback.format_exception(error))}


def send(channel: "Channel", message: dict[str, Any]) -> None:
    """Send a message to the trainer; ends the process if the trainer is gone."""
    try:
        channel.send_bytes(json.dumps(message).encode())
    except OSError:  # the trainer is gone
        end_all()


def end_all() -> None:
    """Kills this process and the commands that it started: the process group that it leads."""
    os.killpg(os.getpid(), signal.SIGKILL)


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


def _staged(results: Results, done: "Future[str | None]") -> None:
    """Reports the end of staging; an error is announced like a batch."""
    error = done.exception()
    if error is not None:
        results.fail(error)
    elif done.result() is not None:
        print_line(f"{done.result()}")


def _slices(count: int, threads: int) -> list[slice]:
    """Near-equal slices that cover range(count)."""
    slices = num_slices(count, threads)
    borders = [count * part // slices for part in range(slices + 1)]
    return [slice(a, b) for a, b in pairwise(borders) if a < b]


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), _serve)
