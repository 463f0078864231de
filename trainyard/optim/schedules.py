"""Learning rate, weight decay and drop path as pure functions of the step."""

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from trainyard.course import Course, Duration, Stage
from trainyard.section import Section

Fraction = Annotated[float, Field(ge=0, le=1)]


class ScheduleConfig(Section):
    name: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    per: Literal["step", "epoch"] = "step"
    """Whether rates change in every step, or are the same throughout an epoch."""
    warmup: Duration = "0 steps"
    """How long the learning rate rises to `optim.lr`, in a straight line."""
    warmup_from: Fraction = 0.0
    """The share of `optim.lr` that the rise begins with."""
    warmup_ends: Literal["first", "both", "neither"] = "first"
    """Which ends of the rise belong to the warm-up: the first (torch, timm), both (ConvNeXt) or
    neither (Colossal-AI)."""
    min_lr: float = Field(0.0, ge=0)
    """Where cosine and linear end."""
    milestones: tuple[Duration, ...] = ()
    """Of step: when the learning rate is multiplied by `gamma`."""
    gamma: float = Field(0.1, gt=0, le=1)
    """Of step."""
    weight_decay_end: float | None = Field(None, ge=0)
    """Where a cosine from `optim.weight_decay` ends, over the whole run; constant if not given."""
    drop_path_start: float | None = Field(None, ge=0, lt=1)
    """Where a straight line to `model.drop_path` begins, over the whole run, by epochs; constant
    if not given."""
    image_size: tuple[Stage, ...] = ()
    """Progressive resizing: ["6 epochs: 160", "12 epochs: 192"] after `data.image_size`."""
    batch_size: tuple[Stage, ...] = ()
    """Larger or smaller global batches after `batch.size`: ["30 epochs: 4096"]."""


class Rates(NamedTuple):
    lr: float
    weight_decay: float
    drop_path: float | None  # None where the model keeps its own


Schedule = Callable[[int], Rates]
"""The rates of each step, counted from 0."""


def build_schedule(
    config: ScheduleConfig,
    course: Course,
    *,
    lr: float,
    weight_decay: float,
    drop_path: float | None,
) -> Schedule:
    """The rates of a run, from the peaks that are given."""
    shape = {"cosine": cosine, "constant": constant}[config.name]
    warmup = float(course.at(config.warmup))

    def schedule(step: int) -> Rates:
        if step < warmup:
            return Rates(lr * step / warmup, weight_decay, drop_path)
        progress = (step - warmup) / max(course.num_steps - warmup, 1)
        return Rates(shape(lr, config.min_lr, progress), weight_decay, drop_path)

    return schedule


def cosine(lr: float, min_lr: float, progress: float) -> float:
    """Half a cosine from `lr` at progress 0 to `min_lr` at 1 (Loshchilov and Hutter 2017)."""
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def constant(lr: float, min_lr: float, progress: float) -> float:
    return lr
