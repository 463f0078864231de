"""Batches in the order of a plan, decoded ahead by one process of threads per rank.

This is the trainer's side: it starts the loader process (`loader_process.py`), takes finished
batches out of the shared ring in order, and hands the slots back. Threads in the trainer's own
process would slow the trainer; several processes would each hold the index and the decoders.
"""

import json
import multiprocessing.connection as mpc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from trainyard.data.augment import CentralCrop, RandomResizedCrop
from trainyard.data.decode import Interpolation
from trainyard.data.index import Index
from trainyard.data.plan import Plan
from trainyard.data.ring import Ring
from trainyard.errors import DataError, LoaderError
from trainyard.section import Section

_COMMAND = (sys.executable, "-m", "trainyard.data.loader_process")
_NUM_SLOTS = 3  # one with the trainer, one ready, one being filled
_CHECK_S = 0.5  # how often a waiting trainer looks whether the loader process still lives
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


Positive = Annotated[float, Field(gt=0)]
Locations = str | Annotated[tuple[str, ...], Field(min_length=1)]


class DataConfig(Section):
    train: Locations | None = None
    """Location of the training data: a folder, shards, a brace list; --data sets it and `val`.
    Of a list of several the samples are merged, and the classes by their names."""
    val: Locations | None = None
    """Location of the validation data, or a list of several."""
    order: Literal["exact", "resample"] = "exact"
    """exact: every sample once an epoch; resample: runs of samples of shards drawn with
    replacement."""
    locality: int = Field(0, ge=0)
    """For storage where random access is slow: samples that are shuffled at a time, out of blocks
    of neighbours, in the exact order; 0 shuffles all."""
    weights: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    """How often an epoch has each sample of each location in `train`, [2, 0.5] say; once if not
    given."""
    repeats: int = Field(1, ge=1)
    """How often a sample comes in a row, with another crop each time (repeated augmentation); an
    epoch stays as long."""
    image_size: int = Field(224, ge=1)
    """Side of a training image in pixels."""
    eval_size: int | None = Field(None, ge=1)
    """Side of an evaluation image in pixels; as `image_size` if not given."""
    crop_pct: float = Field(0.875, gt=0, le=1)
    """Share of the short side that the central evaluation crop covers."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of each colour channel, on a scale of 0 to 1."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each colour channel, on a scale of 0 to 1."""
    interpolation: Interpolation = "bilinear"
    """How images are resized; always antialiased."""
    max_bad: float = Field(0.01, ge=0, le=1)
    """Share of samples that may be unreadable before the run stops."""
    threads: int | None = Field(None, ge=1)
    """Loader threads per rank; by default the rank's share of the machine's cores."""
    stage: str | None = None
    """Folder on each node's own disk for copies of the data, $SLURM_TMPDIR say; made while
    training goes on, once per node, and used again by later runs."""
    stage_gb: float | None = Field(None, gt=0)
    """GB that all copies in that folder may take; the least recently used make room."""


class BadSample(NamedTuple):
    """A sample that could not be read or decoded."""

    id: int
    file: str
    offset: int
    reason: str


class HostBatch(NamedTuple):
    """One rank's share of a global batch; its arrays are valid until the next one is fetched."""

    images_BHWC: NDArray[np.uint8]
    labels: NDArray[np.int64]
    ids: NDArray[np.int64]
    visits: NDArray[np.int64]  # which visit to its sample each is; see Plan.epochs
    weights: NDArray[np.float32]  # 0 for a bad sample, else 1
    bad: list[BadSample]


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """All that the loader process needs to know; plain data."""

    plan: Plan
    crop: RandomResizedCrop | CentralCrop
    image_size: int  # pixels, square
    interpolation: Interpolation
    start: int  # first step
    stop: int  # one past the last step
    rank: int
    size: int
    threads: int
    stage: str | None = None  # as in DataConfig
    stage_gb: float | None = None


class Loader:
    """An iterator over one rank's batches; a context manager that leaves nothing behind."""

    def __init__(self, index: Index, config: LoaderSpec) -> None:
        self._steps_left = config.stop - config.start
        share = -(-config.plan.global_batch // config.size)
        shape = {"num_slots": _NUM_SLOTS, "batch": share, "size": config.image_size}
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("trainyard-batches", os.MFD_CLOEXEC)
        try:
            self._ring = Ring(memory, **shape)
            with _signals_blocked():
                self._process = subprocess.Popen(
                    [*_COMMAND, str(theirs.fileno()), str(memory)],
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # out of reach of Ctrl-C and of a launcher's killpg
                )
        finally:
            os.close(memory)
            theirs.close()
        self._channel = mpc.Connection(ours.detach())
        spec = {
            "index": [str(index.path), index.fingerprint],
            "ring": shape,
            "config": config,
        }
        self._held: int | None = None
        try:
            self._channel.send(spec)
            for slot in range(_NUM_SLOTS):
                self._channel.send_bytes(bytes([slot]))
        except OSError:
            raise self._death() from None

    def __iter__(self) -> Iterator[HostBatch]:
        return self

    def __next__(self) -> HostBatch:
        """The next batch. DataError if the data is gone, LoaderError if the loader failed."""
        if self._steps_left == 0:
            raise StopIteration
        message = self._exchange()
        if "data_error" in message:
            raise DataError(message["data_error"])
        if "error" in message:
            raise LoaderError(f"the loader process failed:\n{message['error']}")
        self._steps_left -= 1
        self._held = message["slot"]
        slot, count = self._ring.slots[self._held], message["count"]
        return HostBatch(
            images_BHWC=slot.images_BHWC[:count],
            labels=slot.labels[:count],
            ids=slot.ids[:count],
            visits=slot.visits[:count],
            weights=slot.weights[:count],
            bad=[BadSample(*row) for row in message["bad"]],
        )

    def _exchange(self) -> dict[str, Any]:
        """Hand the held slot back and wait for the next full one."""
        try:
            if self._held is not None:
                with suppress(OSError):  # it may have ended with an error, which is read below
                    self._channel.send_bytes(bytes([self._held]))
            while not self._channel.poll(_CHECK_S):
                if self._process.poll() is not None and not self._channel.poll(0):
                    raise self._death()
            message: dict[str, Any] = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        return message

    def _death(self) -> LoaderError:
        code = self._process.wait(timeout=10)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return LoaderError(
            f"the loader process died ({how}); signal 9 without your doing usually means that "
            "the machine ran out of memory"
        )

    def close(self) -> None:
        """End the loader process; it stops by itself when the channel closes."""
        self._channel.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # stuck in the kernel, on a dead file server say
            self._process.kill()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started inside never gets the signals that end a run, not even while it starts.

    The trainer decides when to end: a signal to all processes must not cut its last steps.
    """
    mine = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mine)
