"""Messages from a loader process to the trainer: one for each batch, in order.

The thread that fills a batch's last slice sends the message; a separate thread would have to be
woken for every batch."""

import json
import multiprocessing.connection as mpc
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.data.batch import BadSample, HostBatch
from trainyard.errors import DataError

if TYPE_CHECKING:
    Channel = mpc.Connection[Any, Any]


@dataclass(frozen=True)
class BatchTask:
    """A batch to be filled."""

    count: int  # samples
    fill: Callable[[HostBatch, slice], list[BadSample]]  # called in threads, once for each slice
    is_last: bool = False  # of a pass over a stream


class FilledSlice(NamedTuple):
    """A slice that a thread has filled."""

    bad: list[BadSample]
    seconds: float  # duration


@dataclass
class PendingBatch:
    """A batch that threads are filling."""

    slot: int
    work: BatchTask
    slices: list[FilledSlice | None] = field(default_factory=list)
    """The filled slices in the order of the samples; None for one that is not filled yet."""
    error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or None not in self.slices


class ResultSender:
    """Announces batches in the order in which they were begun."""

    def __init__(self, channel: "Channel", threads: int) -> None:
        self._channel, self._threads = channel, threads
        self._pending: deque[PendingBatch] = deque()
        self._lock = threading.Lock()

    def begin(self, slot: int, work: BatchTask, slices: int) -> PendingBatch:
        """Registers a batch that is filled in `slices` slices."""
        batch = PendingBatch(slot, work, [None] * slices)
        with self._lock:
            self._pending.append(batch)
        if not slices:  # a rank's share of a short batch may be empty
            self._tell()
        return batch

    def fill(self, batch: PendingBatch, number: int, slot: HostBatch, part: slice) -> None:
        """Fills a slice, then announces all finished batches; an error is announced too."""
        begun = time.perf_counter()
        try:
            bad = batch.work.fill(slot, part)
            batch.slices[number] = FilledSlice(bad, time.perf_counter() - begun)
        except Exception as error:
            batch.error = error
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Announces an error after all batches that have been begun."""
        with self._lock:
            self._pending.append(PendingBatch(0, BatchTask(0, lambda slot, part: []), error=error))
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            while self._pending and self._pending[0].is_done:
                batch = self._pending.popleft()
                if batch.error is not None:
                    send(self._channel, described(batch.error))
                    os._exit(1)
                send(self._channel, announcement(batch, self._threads))


def announcement(batch: PendingBatch, threads: int) -> dict[str, Any]:
    """The message about a batch."""
    filled = [part for part in batch.slices if part is not None]
    work, seconds = batch.work, sum(part.seconds for part in filled)
    return {
        "slot": batch.slot,
        "count": work.count,
        "is_last": work.is_last,
        "bad": [row for part in filled for row in part.bad],
        "capacity": work.count * threads / seconds if seconds else 0.0,
    }


def described(error: BaseException) -> dict[str, Any]:
    """The message about an error: its text for a DataError, else a traceback."""
    if isinstance(error, DataError):  # the whole data set fails, say because a server is gone
        return {"data_error": str(error)}
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
