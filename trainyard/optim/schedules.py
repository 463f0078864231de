"""Learning rate, weight decay and drop path as pure functions of the step."""

import math
from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from trainyard.course import Course
from trainyard.errors import RecipeError
from trainyard.optim.config import ScheduleConfig


class Rates(NamedTuple):
    lr: float
    weight_decay: float
    drop_path: float | None  # None if the model keeps its own


Schedule = Callable[[int], Rates]
"""Rates by step, counted from 0."""

Curve = Callable[[float], float]
"""A value over time in steps, or in whole epochs if rates change per epoch."""


def build_schedule(
    config: ScheduleConfig,
    course: Course,
    *,
    lr: float,
    weight_decay: float,
    drop_path: float | None,
) -> Schedule:
    """The rates of a run. `lr` is the highest, `drop_path` the last, `weight_decay` the first.

    RecipeError if keys contradict each other.
    """
    rate = _learning_rate(config, course, lr)
    decay = _weight_decay(config, course, weight_decay)
    drop = _drop_path(config, course, drop_path)

    def schedule(step: int) -> Rates:
        step = min(step, course.num_steps - 1)  # a stream may be longer than expected
        epoch = course.samples(step) // course.epoch_samples
        now = step if config.per == "step" else epoch
        return Rates(rate(now), decay(now), drop(epoch))

    return schedule


def _learning_rate(config: ScheduleConfig, course: Course, lr: float) -> Curve:
    measure = course.at if config.per == "step" else course.epochs
    warmup, end = float(measure(config.warmup)), float(measure(course.length))
    start = warmup if config.warmup_prefix else 0.0
    if config.decay is not None:
        first = course.before_end(config.decay)
        start = max(start, float(first if config.per == "step" else course.epochs_at(first)))
    milestones = [measure(milestone) for milestone in config.milestones]
    _check(config, lr, milestones)

    def after_warmup(now: float) -> float:
        if config.name == "step":
            return lr * config.gamma ** bisect_right(milestones, now)
        if config.name == "constant":
            return lr
        shape = {"cosine": cosine, "linear": linear, "sqrt": sqrt}[config.name]
        return shape(lr, config.min_lr, (now - start) / (end - start)) if now >= start else lr

    def rate(now: float) -> float:
        if now >= warmup:
            return after_warmup(now)
        share = _rise(now, warmup, config.warmup_ends)
        return lr * (config.warmup_from + (1 - config.warmup_from) * share)

    return rate


def _rise(now: float, warmup: float, ends: str) -> float:
    """Progress of the warm-up, 0 to 1, for times from 0 up to below `warmup`."""
    if ends == "first":
        return now / warmup
    if ends == "neither":
        return (now + 1) / (warmup + 1)
    # A warm-up of a fractional number of steps could overshoot by the fraction.
    return min(now / (warmup - 1), 1) if warmup > 1 else 0


def _weight_decay(config: ScheduleConfig, course: Course, first: float) -> Curve:
    last = config.weight_decay_end
    if last is None:
        return lambda now: first
    measure = course.at if config.per == "step" else course.epochs
    end = float(measure(course.length))
    return lambda now: cosine(first, last, now / end)


def _drop_path(
    config: ScheduleConfig, course: Course, last: float | None
) -> Callable[[int], float | None]:
    first = config.drop_path_start
    if first is None:
        return lambda epoch: None
    if not last:
        raise RecipeError(
            "recipe.drop-path-unset",
            "schedule.drop_path_start needs the rate that it leads to: set model.drop_path, above "
            "0",
        )
    last_epoch = math.ceil(course.epochs(course.length)) - 1
    return lambda epoch: linear(first, last, epoch / max(last_epoch, 1))


def _check(config: ScheduleConfig, lr: float, milestones: list[Fraction]) -> None:
    if config.name in ("cosine", "linear", "sqrt") and config.min_lr > lr:
        raise RecipeError(
            "recipe.min-lr-above-lr",
            "schedule.min_lr = {min_lr:g} is above optim.lr = {lr:g}, the start of the decay: "
            "lower min_lr or raise lr",
            min_lr=config.min_lr,
            lr=lr,
        )
    for (one, other), (begin, end) in zip(
        pairwise(config.milestones), pairwise(milestones), strict=True
    ):
        if begin >= end:
            raise RecipeError(
                "recipe.not-in-order", key="schedule.milestones", value=other, previous=one
            )


def cosine(first: float, last: float, progress: float) -> float:
    """Half a cosine, from progress 0 to 1 (Loshchilov and Hutter 2017, section 3)."""
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * progress))


def linear(first: float, last: float, progress: float) -> float:
    """A straight line, from progress 0 to 1."""
    return (1 - progress) * first + progress * last


def sqrt(first: float, last: float, progress: float) -> float:
    """1 minus the square root, from progress 0 to 1 (Hägele et al. 2024, section 3.2)."""
    return linear(first, last, math.sqrt(progress))
