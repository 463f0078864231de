"""Curves of reports, of one run or the mean over seeds, reduced to few points."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.monitor.history import number
from trainyard.monitor.reports import Report
from trainyard.report.runs import Group, Run

Floats = NDArray[np.float64]

_MOST_STEPS = 400  # of the axes


class Points(NamedTuple):
    steps: Floats
    values: Floats


@dataclass(frozen=True)
class Curve:
    drawn: Points
    """The lowest and highest value of every interval."""
    means: Points
    """The mean of every interval, the input of smoothing."""
    band: tuple[Floats, Floats] | None = None
    """Mean - 2 sigma and mean + 2 sigma over seeds, at the steps of `means`."""


class Axes(NamedTuple):
    """Seconds and epochs of a run at some of its steps."""

    steps: Floats
    seconds: Floats
    epochs: Floats


def curve_of(group: Group, path: str, count: int, scale: float = 1.0) -> Curve | None:
    """The curve of a key, "train.loss" or "val.top1" say; None if no report has it.

    Several runs give their mean at the steps that all of them have reached. A curve has about
    `count` points at most; its values are those of the reports times `scale`.
    """
    kind, _, key = path.partition(".")
    lines = [_points(getattr(run.history, kind), key, scale) for run in group.runs]
    lines = [points for points in lines if len(points.steps)]
    if not lines:
        return None
    if len(lines) == 1:
        return Curve(extremes(lines[0], count), interval_means(lines[0], count // 2))
    steps = _common_steps(lines)
    if not len(steps):
        return None
    values = np.stack([np.interp(steps, *points) for points in lines])
    mean, sigma = Points(steps, values.mean(0)), Points(steps, values.std(0, ddof=1))
    means, spread = interval_means(mean, count // 2), interval_means(sigma, count // 2).values
    band = means.values - 2 * spread, means.values + 2 * spread
    return Curve(extremes(mean, count), means, band)


def _points(reports: Sequence[Report], key: str, scale: float) -> Points:
    rows = [
        (report["step"], value * scale)
        for report in reports
        if (value := number(report, key)) is not None
    ]
    return Points(*np.array(rows, np.float64).reshape(-1, 2).T)


def _common_steps(lines: Sequence[Points]) -> Floats:
    """All steps of any run, from the latest first step to the earliest last step."""
    low = max(points.steps[0] for points in lines)
    high = min(points.steps[-1] for points in lines)
    steps = np.unique(np.concatenate([points.steps for points in lines]))
    return np.asarray(steps[(steps >= low) & (steps <= high)])


def axes_of(group: Group) -> Axes:
    """Axes of a group, at _MOST_STEPS steps at most; the mean over its runs."""
    axes_of_runs = [axes for run in group.runs if len((axes := _axes(run)).steps)]
    if not axes_of_runs:
        return Axes(*np.zeros((3, 0)))
    steps = np.unique(np.concatenate([axes.steps for axes in axes_of_runs]))
    kept = np.linspace(0, len(steps) - 1, min(_MOST_STEPS, len(steps))).astype(int)
    steps = steps[np.unique(kept)]
    seconds = np.mean([np.interp(steps, axes.steps, axes.seconds) for axes in axes_of_runs], axis=0)
    epochs = np.mean([np.interp(steps, axes.steps, axes.epochs) for axes in axes_of_runs], axis=0)
    return Axes(steps, seconds, epochs)


def _axes(run: Run) -> Axes:
    rows = {
        report["step"]: (number(report, "time"), number(report, "epoch"))
        for report in (*run.history.train, *run.history.val)
    }
    complete = [(step, *of) for step, of in sorted(rows.items()) if None not in of]
    return Axes(*np.array(complete, np.float64).reshape(-1, 3).T)


def extremes(points: Points, count: int) -> Points:
    """About `count` of the points at most: first, last, and the extremes of each interval."""
    if len(points.steps) <= count:
        return points
    chosen = {0, len(points.steps) - 1}
    for part in np.array_split(np.arange(len(points.steps)), max(count // 2 - 1, 1)):
        values = points.values[part]
        chosen |= {int(part[values.argmin()]), int(part[values.argmax()])}
    at = np.array(sorted(chosen))
    return Points(points.steps[at], points.values[at])


def interval_means(points: Points, count: int) -> Points:
    """At most `count` points, each the mean of an interval."""
    if len(points.steps) <= count:
        return points
    columns = (np.array_split(column, count) for column in points)
    return Points(*(np.array([part.mean() for part in parts]) for parts in columns))


def smoothed(points: Points, share: float) -> Points:
    """The mean over a window around each point, `share` of the range of steps wide: charts.js."""
    steps, values = points
    to_ends = np.minimum(steps - steps[0], steps[-1] - steps)
    half = np.minimum(share * np.ptp(steps) / 2, to_ends) + 1e-9
    first, stop = np.searchsorted(steps, steps - half), np.searchsorted(steps, steps + half)
    sums = np.concatenate([[0.0], values.cumsum()])
    return Points(steps, (sums[stop] - sums[first]) / (stop - first))
