"""The loader process: reads, decodes and fills the ring, and ends when the trainer does.

Started by `Loader` as `python -m trainyard.data.loader_process CHANNEL_FD MEMORY_FD`. It imports
no torch, so it starts in a fraction of a second and stays small. What it does with batches, not
where it has them from, it has in common with that for streams (`stream/process.py`).
"""

import json
import multiprocessing.connection as mpc
import os
import queue
import resource
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from trainyard.data._native import core
from trainyard.data.fill import Bad, SliceFiller
from trainyard.data.index import load_index
from trainyard.data.loader import LoaderSpec
from trainyard.data.ring import Ring, Slot
from trainyard.data.stage.copies import Copies
from trainyard.data.stage.stager import Stager
from trainyard.errors import DataError

if TYPE_CHECKING:
    Channel = mpc.Connection[Any, Any]


@dataclass(frozen=True)
class Work:
    """A batch to be filled."""

    count: int  # samples
    fill: Callable[[Slot, slice], Bad]  # called once for each slice of it, in threads
    is_last: bool = False  # of a pass over a stream
    expect: Callable[[], None] = lambda: None  # called while there is no slot for it yet


@dataclass(frozen=True)
class Pending:
    """A batch that threads are filling."""

    slot: int
    work: Work
    slices: list[Future[Bad]]

    @staticmethod
    def failure(error: BaseException) -> "Pending":
        """Delivered like an error in a batch: after all batches before it."""
        failed: Future[Bad] = Future()
        failed.set_exception(error)
        return Pending(0, Work(0, lambda slot, part: []), [failed])


Serve = Callable[["Channel", int, dict[str, Any]], None]
"""Does a loader process's work, given the channel, the ring's memory and the spec."""


def run(channel_fd: int, memory_fd: int, serve: Serve) -> None:
    warnings.filterwarnings("ignore", module="PIL")  # odd metadata does not make an image bad
    Image.init()  # here, not in threads: one would pass over the formats another is registering
    channel = mpc.Connection(channel_fd)
    try:
        serve(channel, memory_fd, channel.recv())
    except EOFError:
        pass  # the trainer closed the channel or died
    except DataError as error:
        _send(channel, {"data_error": str(error)})
    except Exception:
        _send(channel, {"error": traceback.format_exc()})
    finally:
        os._exit(0)  # not waiting for threads: what they are filling, nobody will read


def _serve(channel: "Channel", memory_fd: int, spec: dict[str, Any]) -> None:
    config: LoaderSpec = spec["config"]
    path, fingerprint = spec["index"]
    index = load_index(Path(path))
    if index is None or index.fingerprint != fingerprint:
        raise FileNotFoundError(f"the index {path} is gone, or another has taken its place")
    ring = Ring(memory_fd, **spec["ring"])
    stager = Stager(index, config.stage, config.stage_gb) if config.stage else None
    if core is not None:
        core.guard_bus_errors()  # a mapped shard that is cut short costs its samples, not the run
    _open_more_files()
    fill = SliceFiller(index, config, stager.copies if stager else None)
    pending = deliverer(channel)
    if stager is not None:
        stager.start().add_done_callback(partial(_staged, stager.copies, pending))
    fill_all(_batches(config, fill), channel, ring, pending, threads=config.threads)


def _open_more_files() -> None:
    """As many as this process may have open: shards stay mapped."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a container may forbid what it has inherited
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _batches(config: LoaderSpec, fill: SliceFiller) -> Iterator[Work]:
    for step in range(config.start, config.stop):
        ids = config.plan.batch(step, config.rank, config.size)
        epochs = config.plan.epochs(step, config.rank, config.size)
        yield Work(len(ids), partial(fill, ids, epochs), expect=partial(fill.expect, ids))


def fill_all(
    batches: Iterable[Work],
    channel: "Channel",
    ring: Ring,
    pending: "queue.SimpleQueue[Pending]",
    *,
    threads: int,
) -> None:
    """Hand batches to threads, each as soon as there is a slot for it, until the trainer ends."""
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(channel, free), daemon=True)
    listener.start()
    pool = ThreadPoolExecutor(threads)
    try:
        for work in batches:
            work.expect()
            slot = free.get()  # waits here while the trainer is behind
            slices = [
                pool.submit(work.fill, ring.slots[slot], part)
                for part in _slices(work.count, threads)
            ]
            pending.put(Pending(slot, work, slices))
    except DataError as error:
        pending.put(Pending.failure(error))
    listener.join()


def _listen(channel: "Channel", free: "queue.SimpleQueue[int]") -> None:
    """Take back slots; the trainer's end is this process's, whatever it is waiting for."""
    try:
        while True:
            free.put(channel.recv_bytes()[0])
    except (EOFError, OSError):
        _end_all()


def deliverer(channel: "Channel") -> "queue.SimpleQueue[Pending]":
    """A queue of batches that are announced to the trainer in order."""
    pending: queue.SimpleQueue[Pending] = queue.SimpleQueue()
    threading.Thread(target=_deliver, args=(channel, pending), daemon=True).start()
    return pending


def _deliver(channel: "Channel", pending: "queue.SimpleQueue[Pending]") -> None:
    """Announce batches in order, each when all its slices are filled."""
    while True:
        batch = pending.get()
        try:
            bad = [row for part in batch.slices for row in part.result()]
        except DataError as error:  # no single sample, but the data set: a server that is gone
            _send(channel, {"data_error": str(error)})
            os._exit(1)
        except Exception:
            _send(channel, {"error": traceback.format_exc()})
            os._exit(1)
        work = batch.work
        what = {"slot": batch.slot, "count": work.count, "is_last": work.is_last, "bad": bad}
        _send(channel, what)


def _staged(
    copies: Copies, pending: "queue.SimpleQueue[Pending]", done: "Future[str | None]"
) -> None:
    """Staging has ended: an error is delivered like one in a batch."""
    error = done.exception()
    if error is not None:
        pending.put(Pending.failure(error))
    elif done.result() is not None and copies.is_news():
        sys.stderr.write(f"trainyard: {done.result()}\n")


def _send(channel: "Channel", message: dict[str, Any]) -> None:
    try:
        channel.send_bytes(json.dumps(message).encode())
    except OSError:  # nobody listens any more
        _end_all()


def _end_all() -> None:
    """End this process and the commands that it started: all of the group that it leads."""
    os.killpg(os.getpid(), signal.SIGKILL)


def _slices(count: int, threads: int) -> list[slice]:
    """Near-equal slices, one per thread; together they cover range(count)."""
    borders = [count * part // threads for part in range(threads + 1)]
    return [slice(a, b) for a, b in pairwise(borders) if a < b]


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), _serve)
