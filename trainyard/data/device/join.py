"""Batches of streams, where each rank reads its own shards until all ranks are exhausted.

An exhausted rank shadows the others, as in torch's Join: it takes part in every step with samples
of weight 0, whose gradient is exactly zero. With each batch the ranks exchange whether they have
more, so all of them know where a pass ends and the next one begins.
"""

import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from trainyard.children import SAFE_PATH
from trainyard.course import Course, Due
from trainyard.data.batch import Batch, HostBatch, samples_of
from trainyard.data.device.feed import Feed, HostBatches
from trainyard.data.loader.loader import LoaderProcess
from trainyard.data.storage.source import Closing
from trainyard.data.stream.walk import StreamSpec
from trainyard.errors import CheckpointError, DataError
from trainyard.image_size import ImageSize, height_width
from trainyard.world import World, new_group, together

JoinState = dict[str, Any]
"""The saved position of a run in its passes: `ranks`; `ends`, the steps at which passes ended,
counted in batches of the stream; `past`, samples of finished passes; `seen`, samples of the pass so
far, of all ranks."""
NO_SAMPLE = -1
"""The id of padding samples."""
_FEWEST = 2  # samples of a batch; batch norm needs two


_COMMAND = (sys.executable, *SAFE_PATH, "-m", "trainyard.data.stream.process")


class StreamLoader(LoaderProcess):
    """Batches of one pass after the other, on request."""

    def __init__(self, config: StreamSpec) -> None:
        super().__init__(
            _COMMAND,
            {"config": config},
            batch=config.share,
            image_size=config.image_size,
            channels=config.channels,
            threads=config.threads,
        )

    def take(self) -> tuple[HostBatch, bool]:
        """The next batch, and True if it is this rank's last of a pass.

        DataError, which names the shard, if reading fails; LoaderError if the process died.
        """
        batch, message = self.receive()
        return batch, message["is_last"]


@dataclass(frozen=True)
class _Either:
    one: Due
    other: Due

    def due(self, step: int) -> bool:
        return self.one.due(step) or self.other.due(step)


class JoinFeed(Closing):
    """Batches of a run from a step on, pass by pass; a context manager, used on every rank."""

    def __init__(
        self,
        course: Course,
        *,
        open_loader: Callable[[int, int], StreamLoader],
        open_feed: Callable[[HostBatches, int], Feed],
        channels: int,
        resume_state: JoinState,
        world: World,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        """`open_loader(pass, batches)` skips that many batches of a pass.

        `open_feed(batches, first)` makes device batches of host batches; the first batch begins at
        sample `first` of the run. `resume_state` is kept up to date; each pass ends with `report`.
        """
        self._course, self._open_loader, self._open_feed = course, open_loader, open_feed
        self._resume_state, self._world, self._report = resume_state, world, report
        self._channels = channels
        self._ends: list[int] = []
        self._past = 0
        self._seen = 0
        self._step = 0  # batches of the stream so far; a run that was rolled back is behind it
        self._is_dry = False  # True if this rank is exhausted, until the pass ends
        self._message: torch.Tensor | None = None  # of the newest batch, until counted
        self._work: dist.Work | None = None  # the pending exchange of the message
        self._group: Any = None
        self._feed: Feed | None = None
        self._batches: Iterator[Batch] = iter(())

    def seek(self, step: int, skipped: int) -> None:
        """Continues at `step` of the run, and passes over `skipped` samples of the stream.

        Reads the beginning of the pass again. CheckpointError if that cannot be repeated exactly.
        """
        step += skipped // self._batch
        if self._feed is None or step != self._step:  # else rolled back; the data continues
            with together(self._world):
                self._ends = self._ends_before(step)
            self._seen = self._resume_state.get("seen", 0)
            # Checkpoints of 0.2.0 have no count.
            self._past = self._resume_state.get("past", max(self._ends, default=0) * self._batch)
            self.close()
            self._step, self._is_dry = step, False
            self._feed = self._open_feed(self._host_batches(), step * self._batch)
            self._batches = iter(self._feed)
        self._note()

    def is_over(self, step: int) -> bool:
        """True if the run is over after `step` steps, with the newest batch as the last."""
        self._settle()
        return passes_are_over(self._course, step, self._ends)

    def saving(self, every: Due) -> Due:
        """The steps to save at: also the end of a pass, where the number of ranks may change."""
        return _Either(every, self)

    def due(self, step: int) -> bool:
        """True if a pass ended with the newest batch."""
        self._settle()
        return self._ends[-1:] == [self._step]

    @property
    def _batch(self) -> int:
        return self._course.phases[0].batch

    def _ends_before(self, step: int) -> list[int]:
        """The ends of passes up to a step. CheckpointError if the run cannot resume there."""
        if step and "ends" not in self._resume_state:
            raise CheckpointError(
                "checkpoint.not-of-join",
                "data.order = 'join' resumes only from its own checkpoints: use the weights of "
                "this one with model.checkpoint",
            )
        ends: list[int] = self._resume_state.get("ends", [])
        ranks, begin = self._resume_state.get("ranks"), max(ends, default=0)
        if step > begin and ranks != self._world.size:
            raise CheckpointError(
                "checkpoint.inside-pass",
                "the checkpoint of step {step:,} lies inside a pass, and {num_ranks} ranks read "
                "it, each its own shards: go on with {num_ranks}, or remove the checkpoints after "
                "the end of a pass (step {pass_start:,})",
                step=step,
                num_ranks=ranks,
                pass_start=begin,
            )
        return list(ends)

    def _host_batches(self) -> Generator[HostBatch, None, None]:
        phase, world = self._course.phases[0], self._world
        fewest = min(_FEWEST, len(range(world.rank, phase.batch, world.size)))
        nothing = _no_samples(phase.image_size, self._channels)
        begin = max(self._ends, default=0)
        with self._open_loader(len(self._ends), self._step - begin) as loader:
            while True:
                batch = nothing
                if not self._is_dry:
                    batch, self._is_dry = loader.take()
                self._report_pass(len(batch.ids))
                yield _padded(batch, fewest)
                self._settle()

    def _report_pass(self, count: int) -> None:
        """Sends the other ranks whether this one has more, and the samples of this batch."""
        self._step += 1
        self._message = torch.tensor([not self._is_dry, count])
        if self._world.size > 1:
            self._work = dist.all_reduce(self._message, group=self._group, async_op=True)

    def _settle(self) -> None:
        """Counts the newest batch, after its step."""
        if self._message is None:
            return
        num_wet, count = self._message.tolist()
        self._message = None
        self._seen += count
        if num_wet:
            self._note()
        else:
            self._end_pass()

    def _end_pass(self) -> None:
        seen, self._seen = self._seen, 0
        self._past += seen
        if not seen:
            error = DataError(
                "stream.no-samples", "data.train: not one sample in all of its shards"
            )
            error.is_shared = True
            raise error
        self._ends.append(self._step)
        self._is_dry = False
        announced = self._course.epoch_samples
        steps = self._step - max(self._ends[:-1], default=0)
        message = (
            f"pass {len(self._ends)} is over: {seen:,} samples (data.samples = {announced:,}) in "
            f"{steps:,} steps"
        )
        if num_passes(self._course) and steps > math.ceil(announced / self._batch):
            message += (
                f"; schedules end before the run does: data.samples = {steps * self._batch}, full "
                "batches for all of these steps, makes them end with it"
            )
        self._note()  # the report has the counts
        self._report({"kind": "event", "event": "pass", "seen": seen, "message": message})

    def _note(self) -> None:
        self._resume_state.update(
            ranks=self._world.size, ends=list(self._ends), past=self._past, seen=self._seen
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if self._work is not None:
            self._work.wait()  # so that a checkpoint of the step has its counts
            self._work = None
        return batch

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()

    def __enter__(self) -> "JoinFeed":
        if self._world.size > 1:
            # A separate group, so that its messages never mix with those of the gradients.
            self._group = new_group(backend="gloo")
        return self


def num_passes(course: Course) -> int | None:
    """Number of passes of a run; None unless its length is in epochs."""
    return math.ceil(course.epochs(course.length)) if "epoch" in course.length else None


def passes_are_over(course: Course, step: int, ends: Sequence[int]) -> bool:
    """True if a run is over at a step, after passes with some `ends`."""
    passes = num_passes(course)
    return step >= course.num_steps if passes is None else len(ends) >= passes


def _no_samples(image_size: ImageSize, channels: int) -> HostBatch:
    images_BHWC = np.zeros((0, *height_width(image_size), channels), np.uint8)
    return HostBatch(**samples_of(0).columns(), images_BHWC=images_BHWC)


def _padded(batch: HostBatch, fewest: int) -> HostBatch:
    """Pads a batch to `fewest` samples with black ones of weight 0 and class 0."""
    missing = fewest - len(batch.ids)
    if missing <= 0:
        return batch
    padding = samples_of(missing, ids=NO_SAMPLE, weights=0).columns()
    columns: dict[str, Any] = {
        name: np.concatenate([column, padding[name]]) for name, column in batch.columns().items()
    }
    black_BHWC = np.zeros((missing, *batch.images_BHWC.shape[1:]), np.uint8)
    images_BHWC = np.concatenate([batch.images_BHWC, black_BHWC])
    return HostBatch(**columns, images_BHWC=images_BHWC, bad=batch.bad, capacity=batch.capacity)
