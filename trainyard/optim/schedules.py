"""Durations, and the learning rate as a pure function of the step."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from trainyard.section import Section

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(steps?|epochs?|samples?|%)")


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


@dataclass(frozen=True)
class Scale:
    """How long the units of a duration are, in samples."""

    epoch: int
    step: int  # the global batch
    run: int | None = None  # None while the length of the run itself is being worked out

    def samples(self, duration: str) -> Fraction:
        """A duration in samples, exactly."""
        match = _DURATION.fullmatch(duration.strip())
        assert match is not None  # checked when the recipe was read
        amount, unit = Fraction(match[1]), match[2].rstrip("s")
        assert unit != "%" or self.run is not None
        units = {
            "step": Fraction(self.step),
            "epoch": Fraction(self.epoch),
            "sample": Fraction(1),
            "%": Fraction(self.run or 0, 100),
        }
        return amount * units[unit]

    def steps(self, duration: str) -> int:
        """The fewest steps that cover a duration."""
        return math.ceil(self.samples(duration) / self.step)


@dataclass(frozen=True)
class Every:
    """Due at the first step at or after each multiple of a stretch of samples: no drift."""

    samples: Fraction
    batch: int

    def due(self, step: int) -> bool:
        """Whether a multiple lies in the `step`-th batch, counted from 1."""
        if not self.samples:
            return False
        return step * self.batch // self.samples > (step - 1) * self.batch // self.samples


class ScheduleConfig(Section):
    name: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup: Duration = "0 steps"
    """Linear rise from 0 to `optim.lr`."""
    min_lr: float = Field(0.0, ge=0)
    """Where the cosine ends."""


Schedule = Callable[[int], float]
"""The learning rate of each step, counted from 0."""


def build_schedule(config: ScheduleConfig, *, lr: float, scale: Scale) -> Schedule:
    shape = {"cosine": cosine, "constant": constant}[config.name]
    num_steps = scale.steps("100%")
    warmup = float(scale.samples(config.warmup) / scale.step)

    def schedule(step: int) -> float:
        if step + 1 < warmup:
            return lr * (step + 1) / warmup
        progress = (step - warmup + 1) / max(num_steps - warmup, 1)
        return shape(lr, config.min_lr, min(max(progress, 0.0), 1.0))

    return schedule


def cosine(lr: float, min_lr: float, progress: float) -> float:
    """Half a cosine from `lr` at progress 0 to `min_lr` at 1 (Loshchilov and Hutter 2017)."""
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def constant(lr: float, min_lr: float, progress: float) -> float:
    return lr
