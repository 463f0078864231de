"""Throughput limits of the device and of the loader, measured during a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainyard.course import Course
from trainyard.monitor.bounds import Measured
from trainyard.monitor.clock import Clock, Stopwatch, finish
from trainyard.training.step import Batch, StepStats, TrainStep
from trainyard.world import World

_FIRST_S = 60.0
_WARM_UP = 3  # slower first steps of a process or of a phase


class LoadedBatch(Batch, Protocol):
    @property
    def capacity(self) -> float: ...


@dataclass
class _Stretch:
    """Counts since the start of a measured interval."""

    training: float  # clock in seconds at the start
    data_wait: float  # data wait in seconds at the start
    images: int = 0  # of all ranks
    loaded: int = 0  # of this rank, with a known loading time
    loading: float = 0.0  # seconds that the loader needs for `loaded`

    def add(self, batch: LoadedBatch, images: int) -> None:
        self.images += images
        if batch.capacity > 0:
            self.loaded += len(batch.labels)
            self.loading += len(batch.labels) / batch.capacity


class Observed:
    """A step that is measured now and then, with unchanged results.

    The first measurement comes after a minute of training, or after `every_s` if that is less. All
    ranks are assumed to be as fast as this one.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        course: Course,
        clock: Clock,
        world: World,
        device: torch.device,
        every_s: float,
        can_try: bool,
        report: Callable[[Measured], None],
    ) -> None:
        """`can_try`: a rank can try a step without the others, see TrainStep.trial."""
        self._step, self._course, self._clock, self._world = step, course, clock, world
        self._device, self._every_s, self._can_try = device, every_s, can_try
        self._report = report
        self._next = clock.total + min(_FIRST_S, every_s)
        self._stretch = _Stretch(0.0, 0.0)
        self._phase, self._steps = -1, 0

    def __call__(self, batch: LoadedBatch, step: int, rates: Any) -> StepStats:
        phase = self._course.phase(step)
        if phase.start != self._phase:  # batch or image size changed: no mean over both
            self._phase, self._steps = phase.start, 0
        is_due = self._steps > _WARM_UP and self._clock.total >= self._next
        before = self._stretch
        if is_due or self._steps == _WARM_UP:
            finish(self._device)
            self._stretch = _Stretch(self._clock.training, self._clock.seconds("data"))
        self._steps += 1
        self._stretch.add(batch, phase.batch)
        if not is_due:
            return self._step(batch, step, rates)
        return self._measured(batch, step, rates, before)

    def _measured(self, batch: LoadedBatch, step: int, rates: Any, stretch: _Stretch) -> StepStats:
        """Run the step and report the interval before it."""
        update = Stopwatch(self._device)
        stats = self._step.timed(batch, step, rates, update)
        with self._clock.phase("trial"):
            trial = self._step.trial(batch, step) if self._can_try else None
        self._next = self._clock.total + self._every_s
        seconds = self._stretch.training - stretch.training
        ranks = self._world.size
        self._report(
            Measured(
                real=stretch.images / seconds,
                device=ranks * len(batch.labels) / (trial + update.seconds) if trial else None,
                data=ranks * stretch.loaded / stretch.loading if stretch.loading else None,
                data_wait=(self._stretch.data_wait - stretch.data_wait) / seconds,
                ranks=ranks,
            )
        )
        return stats
