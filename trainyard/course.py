"""How a run unfolds: durations, and the steps at which they end.

Everything here is a pure function of the recipe and the length of an epoch, so the number of a
step says how many samples were seen, at which batch and image size the run is, and what is due.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator

from trainyard.errors import RecipeError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(steps?|epochs?|samples?|%)")
_STAGE = re.compile(rf"({_DURATION.pattern})\s*:\s*([1-9]\d*)")


def _checked(text: str) -> str:
    if not _DURATION.fullmatch(text.strip()):
        raise ValueError(
            'write a number and a unit: "5 epochs", "300 steps", "1000 samples", "10%"'
        )
    return text


Duration = Annotated[str, AfterValidator(_checked)]
"""A stretch of training in steps, epochs, samples or percent of the run."""


def _checked_length(text: str) -> str:
    if text.strip().endswith("%"):
        raise ValueError('the length of a run is no percentage: "90 epochs", "100000 steps"')
    if not float(_DURATION.fullmatch(text.strip())[1]):  # type: ignore[index]
        raise ValueError("a run has at least one step")
    return text


Length = Annotated[Duration, AfterValidator(_checked_length)]
"""The length of a run itself: a duration that is neither zero nor a percentage."""


def _checked_stage(text: str) -> str:
    if not _STAGE.fullmatch(text.strip()):
        raise ValueError('write when it begins and a whole number: "5 epochs: 160", "40%: 2048"')
    return text


Stage = Annotated[str, AfterValidator(_checked_stage)]
"""A value and the duration after which it holds."""


@dataclass(frozen=True)
class Phase:
    """A stretch of steps with one batch and one image size."""

    start: int  # its first step, counted from 0
    stop: int  # one past its last
    first_sample: int  # samples seen before `start`
    batch: int  # global
    image_size: int  # pixels


@dataclass(frozen=True)
class Every:
    """Due at the first step at or after each multiple of a duration: no drift."""

    course: "Course"
    duration: str

    def due(self, step: int) -> bool:
        """Whether a multiple lies in the `step`-th batch, counted from 1; of "0 steps" never."""
        amount, is_steps = self.course.amount(self.duration)
        if not amount:
            return False
        position = (lambda n: n) if is_steps else self.course.samples
        return position(step) // amount > position(step - 1) // amount


@dataclass(frozen=True)
class Course:
    epoch_samples: int
    length: str
    phases: tuple[Phase, ...]
    """Back to back from step 0; the last one is the last of the run."""

    @property
    def num_steps(self) -> int:
        return self.phases[-1].stop

    def samples(self, step: int) -> int:
        """Samples of the first `step` steps."""
        phase = self.phase(step)
        return phase.first_sample + (step - phase.start) * phase.batch

    def epoch(self, step: int) -> float:
        return self.samples(step) / self.epoch_samples

    def phase(self, step: int) -> Phase:
        """The phase of a step, counted from 0; the last one goes on for ever."""
        return next((phase for phase in self.phases if step < phase.stop), self.phases[-1])

    def at(self, duration: str) -> Fraction:
        """A duration from the beginning of the run, in steps; the last may be a part of one."""
        amount, is_steps = self.amount(duration)
        return amount if is_steps else _steps(amount, self.phases)

    def every(self, duration: str) -> Every:
        return Every(self, duration)

    def amount(self, duration: str) -> tuple[Fraction, bool]:
        """A duration in steps (and True) or in samples (and False), exactly."""
        return _amount(duration, self.length, self.epoch_samples)


def build_course(
    length: str,
    *,
    epoch_samples: int,
    batch: int,
    image_size: int,
    batch_stages: Sequence[str] = (),
    size_stages: Sequence[str] = (),
) -> Course:
    """The course of a run that begins with `batch` and `image_size`; see Stage for changes."""
    phases = [Phase(0, 0, 0, batch, image_size)]  # without ends as yet

    def first_step(duration: str) -> int:
        amount, is_steps = _amount(duration, length, epoch_samples)
        return math.ceil(amount if is_steps else _steps(amount, phases))

    for start, value in _changes(batch_stages, first_step):
        last = phases[-1]
        seen = last.first_sample + (start - last.start) * last.batch
        phases.append(Phase(start, start, seen, value, image_size))
    num_steps = first_step(length)
    sizes = [(0, image_size), *_changes(size_stages, first_step)]
    starts = sorted({phase.start for phase in phases} | {start for start, _ in sizes})
    starts = [start for start in starts if start < num_steps]
    merged = []
    for start, stop in zip(starts, [*starts[1:], num_steps], strict=True):
        old = [phase for phase in phases if phase.start <= start][-1]
        seen = old.first_sample + (start - old.start) * old.batch
        size = [size for begin, size in sizes if begin <= start][-1]
        merged.append(Phase(start, stop, seen, old.batch, size))
    return Course(epoch_samples, length, tuple(merged))


def _changes(stages: Sequence[str], first_step: Callable[[str], int]) -> Iterator[tuple[int, int]]:
    """The first step and the value of each stage. RecipeError if one begins before another."""
    before = -1
    for stage in stages:
        duration, _, value = stage.rpartition(":")
        start = first_step(duration)
        if start <= before:
            raise RecipeError(f"stage {stage!r} begins no later than the one before it")
        yield start, int(value)
        before = start


def _amount(duration: str, length: str, epoch_samples: int) -> tuple[Fraction, bool]:
    match = _DURATION.fullmatch(duration.strip())
    assert match is not None  # checked when the recipe was read
    amount, unit = Fraction(match[1]), match[2].rstrip("s")
    if unit == "%":
        whole, is_steps = _amount(length, length, epoch_samples)
        return whole * amount / 100, is_steps
    return amount * (epoch_samples if unit == "epoch" else 1), unit == "step"


def _steps(samples: Fraction, phases: Sequence[Phase]) -> Fraction:
    """How many steps `samples` are; the last phase goes on for ever."""
    phase = [phase for phase in phases if phase.first_sample <= samples][-1]
    return phase.start + (samples - phase.first_sample) / phase.batch
