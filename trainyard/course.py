"""The course of a run: durations, and the steps at which they end.

Everything here is a pure function of the recipe and the length of an epoch. The step number thus
determines the samples seen, batch and image size, and whether something is due.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Protocol

from pydantic import AfterValidator

from trainyard.errors import RecipeError
from trainyard.image_size import ImageSize, parse_size

_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"  # so many digits a float holds
_DURATION = re.compile(rf"{_NUMBER}\s*(steps?|epochs?|samples?|%)")
_TIME = re.compile(rf"{_NUMBER}\s*(seconds?|minutes?|hours?)")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600}
_STAGE = re.compile(rf"({_DURATION.pattern})\s*:\s*([1-9]\d*)")
_SIZE_STAGE = re.compile(
    rf"({_DURATION.pattern})\s*:\s*([1-9]\d*|\[\s*[1-9]\d*\s*,\s*[1-9]\d*\s*\])"
)


def _matching(pattern: re.Pattern[str], hint: str) -> AfterValidator:
    """A check that a text is as the pattern says; the error has the hint."""

    def check(text: str) -> str:
        if not pattern.fullmatch(text.strip()):
            raise ValueError(hint)
        return text

    return AfterValidator(check)


Duration = Annotated[
    str,
    _matching(
        _DURATION, 'write a number and a unit: "5 epochs", "300 steps", "1000 samples", "10%"'
    ),
]
"""An amount of training in steps, epochs, samples or percent of the run."""


def _checked_interval(text: str) -> str:
    if not _DURATION.fullmatch(text.strip()) and not _TIME.fullmatch(text.strip()):
        raise ValueError(
            'write a number and a unit: "10 minutes", "2 hours", "1 epoch", "300 steps", "5%"'
        )
    if seconds_of(text) == 0:
        raise ValueError('write a time above 0, or "0 steps" for never')
    return text


Interval = Annotated[str, AfterValidator(_checked_interval)]
"""A duration, or a time in seconds, minutes or hours."""


def seconds_of(interval: str) -> float | None:
    """The seconds of an interval that is a time; None for an amount of training."""
    match = _TIME.fullmatch(interval.strip())
    return float(match[1]) * _SECONDS[match[2].rstrip("s")] if match else None


def _checked_length(text: str) -> str:
    if text.strip().endswith("%"):
        raise ValueError('the length of a run cannot be a percentage: "90 epochs", "100000 steps"')
    if not float(_DURATION.fullmatch(text.strip())[1]):  # type: ignore[index]
        raise ValueError("a run has at least one step")
    return text


Length = Annotated[Duration, AfterValidator(_checked_length)]
"""The length of a run: a duration that is neither zero nor a percentage."""


Stage = Annotated[
    str,
    _matching(
        _STAGE, 'write the beginning of the stage and a whole number: "5 epochs: 160", "40%: 2048"'
    ),
]
"""A value, and the duration after which it applies."""


SizeStage = Annotated[
    str,
    _matching(
        _SIZE_STAGE,
        "write the beginning of the stage and a side, or height and width: "
        '"5 epochs: 160", "40%: [128, 256]"',
    ),
]
"""An image size, and the duration after which it applies."""


def stage_size(stage: str) -> ImageSize:
    """The image size of a stage."""
    return parse_size(stage.rpartition(":")[2].strip())


def amount_of(duration: str) -> tuple[Fraction, str] | None:
    """The number and the unit of a duration: step, epoch, sample or %; None for other text."""
    match = _DURATION.fullmatch(duration.strip())
    return (Fraction(match[1]), match[2].rstrip("s")) if match else None


@dataclass(frozen=True)
class Phase:
    """Consecutive steps with one batch and one image size."""

    start: int  # its first step, counted from 0
    stop: int  # one past its last
    first_sample: int  # samples seen before `start`
    batch: int  # global
    image_size: ImageSize


class Due(Protocol):
    def due(self, step: int) -> bool: ...


@dataclass(frozen=True)
class Every:
    """Due at the first step at or after each multiple of an amount: no drift."""

    position: Callable[[int], int]
    """Steps or samples, in the unit of the amount, of the first `step` steps."""
    amount: Fraction

    def due(self, step: int) -> bool:
        """True if a multiple lies in the `step`-th batch, counted from 1; never for amount 0."""
        return self.times(step) > self.times(step - 1)

    def times(self, step: int) -> int:
        """Number of times due in the first `step` steps."""
        return int(self.position(step) // self.amount) if self.amount else 0


@dataclass(frozen=True)
class Course:
    epoch_samples: int
    length: str
    phases: tuple[Phase, ...]
    """Without gaps from step 0; the last one is the last of the run."""

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
        """The phase of a step, counted from 0; the last one has no end."""
        return _phase(step, self.phases)

    def at(self, duration: str) -> Fraction:
        """A duration from the start of the run in steps, which may be fractional."""
        amount, is_steps = self._amount(duration)
        return amount if is_steps else _steps(amount, self.phases)

    def before_end(self, duration: str) -> Fraction:
        """The time that is a duration before the end of the run, in steps; 0 if it is longer."""
        end, (amount, is_steps) = self.at(self.length), self._amount(duration)
        if not is_steps:
            return _steps(max(_samples(end, self.phases) - amount, Fraction(0)), self.phases)
        return max(end - amount, Fraction(0))

    def epochs_at(self, step: Fraction) -> Fraction:
        """A time in steps, in epochs."""
        return _samples(step, self.phases) / self.epoch_samples

    def epochs(self, duration: str) -> Fraction:
        """A duration from the start of the run, in epochs."""
        amount, is_steps = self._amount(duration)
        return (_samples(amount, self.phases) if is_steps else amount) / self.epoch_samples

    def every(self, duration: str) -> Every:
        amount, is_steps = self._amount(duration)
        return Every(int if is_steps else self.samples, amount)

    def _amount(self, duration: str) -> tuple[Fraction, bool]:
        return _amount(duration, self.length, self.epoch_samples)


def build_course(
    length: str,
    *,
    epoch_samples: int,
    batch: int,
    image_size: ImageSize,
    batch_stages: Sequence[str] = (),
    size_stages: Sequence[str] = (),
) -> Course:
    """The course of a run that starts with `batch` and `image_size`; see Stage for changes.

    A stage starts with the first step at or after its duration; stages after the end of the run
    are left out. RecipeError if stages are not in order.
    """
    batches = [Phase(0, 0, 0, batch, image_size)]  # ends are set below

    def position(duration: str) -> Fraction:
        """A duration in steps; durations in samples are converted with the batches known so far."""
        amount, is_steps = _amount(duration, length, epoch_samples)
        return amount if is_steps else _steps(amount, batches)

    for start, stage in _changes("schedule.batch_size", batch_stages, position):
        value = int(stage.rpartition(":")[2])
        batches.append(Phase(start, start, int(_samples(start, batches)), value, image_size))
    num_steps = math.ceil(position(length))
    changes = _changes("schedule.image_size", size_stages, position)
    sizes = [(0, image_size), *((start, stage_size(stage)) for start, stage in changes)]
    starts = {phase.start for phase in batches} | {start for start, _ in sizes}
    borders = [*sorted(start for start in starts if start < num_steps), num_steps]
    phases = []
    for start, stop in pairwise(borders):
        now = _phase(start, batches).batch
        size = [size for begin, size in sizes if begin <= start][-1]
        phases.append(Phase(start, stop, int(_samples(start, batches)), now, size))
    return Course(epoch_samples, length, tuple(phases))


def _changes(
    key: str, stages: Sequence[str], position: Callable[[str], Fraction]
) -> Iterator[tuple[int, str]]:
    """The first step of each stage, and the stage."""
    before, previous = Fraction(-1), ""
    for stage in stages:
        duration = stage.rpartition(":")[0]
        begin = position(duration)
        # Compared exactly, not in whole steps: in a short run stages may start with the same step.
        if begin <= before:
            raise RecipeError("recipe.not-in-order", key=key, value=stage, previous=previous)
        yield math.ceil(begin), stage
        before, previous = begin, stage


def _amount(duration: str, length: str, epoch_samples: int) -> tuple[Fraction, bool]:
    """A duration, exactly: in steps (and True), or in samples (and False)."""
    parsed = amount_of(duration)
    assert parsed is not None  # checked when the recipe was read
    amount, unit = parsed
    if unit == "%":
        of_whole, is_steps = _amount(length, length, epoch_samples)
        return of_whole * amount / 100, is_steps
    return amount * (epoch_samples if unit == "epoch" else 1), unit == "step"


# --- between steps and samples; only the starts of phases matter, so the last has no end ---


def _steps(samples: Fraction, phases: Sequence[Phase]) -> Fraction:
    phase = [phase for phase in phases if phase.first_sample <= samples][-1]
    return phase.start + (samples - phase.first_sample) / phase.batch


def _samples(step: Fraction | int, phases: Sequence[Phase]) -> Fraction:
    phase = _phase(step, phases)
    return phase.first_sample + (step - phase.start) * Fraction(phase.batch)


def _phase(step: Fraction | int, phases: Sequence[Phase]) -> Phase:
    return [phase for phase in phases if phase.start <= step][-1]
