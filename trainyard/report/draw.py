"""Charts as SVG pictures that need no script, against steps."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trainyard.report.charts import Chart, Series
from trainyard.report.curves import Floats, Points, lowest_and_highest, smoothed
from trainyard.report.markup import Html, join, tag
from trainyard.report.ticks import padded, short, tick_text, ticks

SMOOTHING = 0.02
"""Window of the average of noisy curves, as a share of a run's length."""
_POINTS = 240  # per curve; the script has more
_SIZES = {True: (640, 300), False: (420, 190)}  # width and height of large charts, and of others
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 36


@dataclass(frozen=True)
class _Frame:
    """Maps steps and values to positions in the picture."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]

    def left(self, step: float) -> float:
        inner = self.width - _LEFT - _RIGHT
        return round(_LEFT + (step - self.x[0]) / (self.x[1] - self.x[0]) * inner, 1)

    def top(self, value: float) -> float:
        inner = self.height - _TOP - _BOTTOM
        return round(_TOP + (self.y[1] - value) / (self.y[1] - self.y[0]) * inner, 1)

    def path(self, points: Points) -> str:
        places = zip(points.steps.tolist(), points.values.tolist(), strict=True)
        return "M" + "L".join(f"{self.left(step)} {self.top(value)}" for step, value in places)


def drawn(chart: Chart) -> Html:
    width, height = _SIZES[chart.is_large]
    frame = _Frame(width, height, _steps(chart), limits(chart))
    return tag(
        "svg",
        _grid(frame, chart),
        *(_curve(frame, series) for series in chart.series),
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"{chart.title} against steps; the figures are in the table below",
    )


def _steps(chart: Chart) -> tuple[float, float]:
    ends = [float(each.curve.drawn.steps[-1]) for each in chart.series]
    starts = [float(each.curve.drawn.steps[0]) for each in chart.series]
    low = 0.0 if min(starts) < 0.2 * max(ends) else min(starts)
    return (low, max(ends)) if max(ends) > low else padded(low, max(ends))


def limits(chart: Chart) -> tuple[float, float]:
    """The lowest and highest drawn value, with a margin; percentages stay within 0 and 100%."""
    columns = [each.curve.drawn.values for each in chart.series]
    columns += [side for each in chart.series for side in each.curve.band or ()]
    values = np.concatenate(columns)
    low, high = padded(float(values.min()), float(values.max()))
    if chart.from_zero:
        low = 0.0
        high = high if high > 0 else 1.0
    if chart.kind == "percent":
        low, high = max(low, 0.0), min(high, 1.0)
    return (low, high) if high > low else padded(low, high)


def _grid(frame: _Frame, chart: Chart) -> Html:
    right, bottom = frame.width - _RIGHT, frame.height - _BOTTOM
    lines: list[Html] = []
    for value in ticks(*frame.y, count=6 if chart.is_large else 4):
        y = frame.top(value)
        lines.append(tag("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
        label = tick_text(chart.kind, value)
        lines.append(tag("text", label, x=_LEFT - 8, y=y + 4, class_="tick", text_anchor="end"))
    for step in ticks(*frame.x, count=8 if chart.is_large else 5):
        x = frame.left(step)
        lines.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
        label = short(step)
        lines.append(tag("text", label, x=x, y=bottom + 17, class_="tick", text_anchor="middle"))
    lines.append(tag("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    lines.append(tag("text", "steps", x=right, y=bottom + 32, class_="unit", text_anchor="end"))
    return join(*lines)


def _curve(frame: _Frame, series: Series) -> Html:
    curve, colour = series.curve, f"c{series.colour}"
    parts: list[Html] = []
    if curve.band:
        parts.append(tag("path", d=_around(frame, curve.means.steps, *curve.band), class_="band"))
    points = lowest_and_highest(curve.drawn, _POINTS)
    line = "line dashed" if series.is_dashed else "line"
    if series.is_noisy:
        parts.append(tag("path", d=frame.path(points), class_="line faint"))
        points = Points(curve.means.steps, smoothed(curve.means, SMOOTHING))
    parts.append(tag("path", d=frame.path(points), class_=line))
    if series.has_dots or len(points.steps) == 1:
        parts += _dots(frame, curve.drawn)
    return tag("g", *parts, class_=colour)


def _dots(frame: _Frame, points: Points) -> Iterable[Html]:
    for step, value in zip(points.steps.tolist(), points.values.tolist(), strict=True):
        yield tag("circle", cx=frame.left(step), cy=frame.top(value), r=2.5, class_="dot")


def _around(frame: _Frame, steps: Floats, low: Floats, high: Floats) -> str:
    forth = Points(steps, np.clip(high, *frame.y))
    back = Points(steps[::-1], np.clip(low, *frame.y)[::-1])
    return f"{frame.path(forth)}L{frame.path(back)[1:]}Z"
