"""Curves from reports, of one run or the mean over seeds, reduced to few points."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.monitor.reports import Report
from trainyard.report.groups import Group
from trainyard.report.runs import Run, number

Floats = NDArray[np.float64]
Reports = Callable[[Run], list[Report]]


class Points(NamedTuple):
    steps: Floats
    values: Floats


@dataclass(frozen=True)
class Curve:
    """`drawn` keeps the extremes of every interval; `means` is the input of smoothing."""

    drawn: Points
    means: Points
    band: tuple[Floats, Floats] | None = None
    """Mean - 2 sigma and mean + 2 sigma over seeds, at the steps of `means`."""


class Axes(NamedTuple):
    """Seconds and epochs of a run at some of its steps."""

    steps: Floats
    seconds: Floats
    epochs: Floats


def curve_of(group: Group, reports: Reports, key: str, points: int) -> Curve | None:
    """A curve of `key`, None if no report has it. For several runs, the mean over common steps."""
    found = [_points(reports(run), key) for run in group.runs]
    found = [each for each in found if len(each.steps)]
    if not found:
        return None
    if len(found) == 1:
        return Curve(lowest_and_highest(found[0], points), stretches(found[0], points // 2))
    steps = _common_steps(found)
    if not len(steps):
        return None
    values = np.stack([np.interp(steps, *each) for each in found])
    mean, sigma = values.mean(0), values.std(0, ddof=1)
    means = stretches(Points(steps, mean), points // 2)
    spread = stretches(Points(steps, sigma), points // 2).values
    band = means.values - 2 * spread, means.values + 2 * spread
    return Curve(lowest_and_highest(Points(steps, mean), points), means, band)


def axes_of(group: Group, points: int = 400) -> Axes:
    """Axes of a group; the mean over its runs."""
    found = [_axes(run) for run in group.runs]
    found = [each for each in found if len(each.steps)]
    if not found:
        return Axes(np.zeros(0), np.zeros(0), np.zeros(0))
    steps = np.unique(np.concatenate([each.steps for each in found]))
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(points, len(steps))).astype(int))
    steps = steps[chosen]
    seconds, epochs = (
        np.mean([np.interp(steps, each.steps, each[column]) for each in found], axis=0)
        for column in (1, 2)
    )
    return Axes(steps, seconds, epochs)


def _axes(run: Run) -> Axes:
    rows = {
        report["step"]: (number(report, "time"), number(report, "epoch"))
        for report in (*run.history.train, *run.history.val)
    }
    whole = [(step, *of) for step, of in sorted(rows.items()) if None not in of]
    return Axes(*np.array(whole, np.float64).reshape(-1, 3).T)


def _points(reports: Sequence[Report], key: str) -> Points:
    rows = [
        (report["step"], value) for report in reports if (value := number(report, key)) is not None
    ]
    return Points(*np.array(rows, np.float64).reshape(-1, 2).T)


def _common_steps(found: Sequence[Points]) -> Floats:
    """All steps of any run, from the latest first step to the earliest last step."""
    low = max(each.steps[0] for each in found)
    high = min(each.steps[-1] for each in found)
    steps = np.unique(np.concatenate([each.steps for each in found]))
    return np.asarray(steps[(steps >= low) & (steps <= high)])


def lowest_and_highest(points: Points, count: int) -> Points:
    """About `count` of the points at most, with the extremes of each interval."""
    if len(points.steps) <= count:
        return points
    chosen = {0, len(points.steps) - 1}
    for part in np.array_split(np.arange(len(points.steps)), max(count // 2 - 1, 1)):
        values = points.values[part]
        chosen |= {int(part[values.argmin()]), int(part[values.argmax()])}
    at = np.array(sorted(chosen))
    return Points(points.steps[at], points.values[at])


def stretches(points: Points, count: int) -> Points:
    """At most `count` points, each the mean of an interval."""
    if len(points.steps) <= count:
        return points
    parts = np.array_split(np.arange(len(points.steps)), count)
    return Points(
        np.array([points.steps[part].mean() for part in parts]),
        np.array([points.values[part].mean() for part in parts]),
    )


def smoothed(points: Points, share: float) -> Floats:
    """The mean over a window around each point, `share` of the range of steps wide.

    Near the ends the window shrinks on both sides alike, so that the mean is not shifted.
    """
    steps, values = points
    if len(steps) < 3 or not share:
        return values
    half = np.minimum(
        share * (steps[-1] - steps[0]) / 2, np.minimum(steps - steps[0], steps[-1] - steps)
    )
    first = np.searchsorted(steps, steps - half - 1e-9, side="left")
    last = np.searchsorted(steps, steps + half + 1e-9, side="right")
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[last] - sums[first]) / (last - first))
