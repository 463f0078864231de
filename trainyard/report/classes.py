"""Accuracy per class: a histogram, a table of the worst and the best, and all of them as data."""

from typing import Any, NamedTuple

import numpy as np

from trainyard.report.markup import Child, Html, join, table, tag
from trainyard.report.runs import Run
from trainyard.report.ticks import short, ticks
from trainyard.training.predictions import ClassAccuracy, per_class

_ALL = 60  # most classes that are all listed without a script
_WORST, _BEST = 25, 10  # rows shown for more classes
_BINS = 20  # histogram bins


def name_of(run: Run, label: int) -> str:
    return run.classes[label] if 0 <= label < len(run.classes) else f"class {label}"


class Classes(NamedTuple):
    content: Html
    data: list[Any]
    """Rows of all classes, the worst first: name, samples, top-1, top-5."""


def classes_section(run: Run) -> Classes | None:
    """The section; None without saved predictions."""
    if run.recorded is None:
        return None
    rows = per_class(run.recorded.said, run.recorded.labels)
    if not rows:
        return None
    is_all = len(rows) <= _ALL
    shown = rows if is_all else [*rows[:_WORST], *rows[-_BEST:]]
    caption = f"All {len(rows):,} classes, the worst first"
    if not is_all:
        caption = f"The {_WORST} worst and the {_BEST} best of {len(rows):,} classes"
    head = ["Class", "", "Top-1", "Top-5", "Images"]
    body = table(head, [_row(run, row) for row in shown], caption=caption, numbers=2)
    picture = None if is_all else _histogram(np.array([row.top1 for row in rows]))
    box = tag("div", body, id="classes-table", data_count=len(rows))
    data = [
        [name_of(run, row.label), row.samples, round(row.top1, 4), round(row.top5, 4)]
        for row in rows
    ]
    return Classes(join(_sentence(rows), picture, box), data)


def _sentence(rows: list[ClassAccuracy]) -> Html:
    top1 = np.array([row.top1 for row in rows])
    text = (
        f"{len(rows):,} classes; the median is recognised in {np.median(top1):.1%} of its images, "
        f"a tenth of the classes in {np.quantile(top1, 0.1):.1%} or fewer."
    )
    return tag("p", text, class_="about")


def _row(run: Run, row: ClassAccuracy) -> list[Child]:
    percents = [f"{100 * value:.1f}%" for value in (row.top1, row.top5)]
    return [name_of(run, row.label), _bar(row.top1), *percents, f"{row.samples:,}"]


def _bar(share: float) -> Html:
    return tag(
        "svg",
        tag("rect", width=100, height=8, class_="track"),
        tag("rect", width=round(100 * share, 1), height=8, class_="bar"),
        viewBox="0 0 100 8",
        class_="meter",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _histogram(top1: np.ndarray[Any, Any]) -> Html:
    """A histogram of classes by top-1 accuracy."""
    counts = np.histogram(top1, _BINS, (0, 1))[0].tolist()
    width, height, left, bottom = 1200, 170, 48, 36
    most, inner = max(counts), width - left - 10
    each, tall = inner / _BINS, height - bottom - 8
    parts: list[Html] = []
    for value in ticks(0, most, 3):
        y = round(8 + tall * (1 - value / most), 1)
        parts.append(tag("line", x1=left, x2=width - 10, y1=y, y2=y, class_="grid"))
        parts.append(
            tag("text", short(value), x=left - 8, y=y + 4, class_="tick", text_anchor="end")
        )
    for place, count in enumerate(counts):
        tip = f"{count} classes between {place / _BINS:.0%} and {(place + 1) / _BINS:.0%}"
        size = round(tall * count / most, 1)
        x, y = round(left + place * each + 1, 1), round(8 + tall - size, 1)
        bar = tag("rect", x=x, y=y, width=round(each - 2, 1), height=size)
        parts.append(tag("g", tag("title", tip), bar, class_="bar"))
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1):
        x = round(left + share * inner, 1)
        label = f"{share:.0%}"
        parts.append(tag("text", label, x=x, y=height - 18, class_="tick", text_anchor="middle"))
    parts.append(
        tag(
            "text", "top-1 of a class", x=width - 10, y=height - 3, class_="unit", text_anchor="end"
        )
    )
    worst = sum(counts[: _BINS // 2])
    label = f"Classes by top-1 accuracy: {worst} of {len(top1)} below 50%"
    svg = tag("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=label)
    caption = tag("figcaption", "Number of classes by their top-1 accuracy")
    return tag("figure", caption, svg, class_="wide")
