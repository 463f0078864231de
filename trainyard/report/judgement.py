"""Confusion matrix and reliability diagram of a run's saved predictions."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray

from trainyard.report.markup import Child, Html, about, join, table, tag
from trainyard.training.predictions import Predictions, confusions, pair_counts
from trainyard.training.recorded import Recorded
from trainyard.training.reliability import Bin, calibration_error, reliability

WHOLE, _PART = 25, 16  # classes of a whole matrix, and of the part that is shown of a larger one
FEW = 10  # columns with horizontal names
_SHADES = 0.0, 0.02, 0.1, 0.3  # shares of a class above which a cell is darker
_SIDE = 100  # units of the diagram
_TICKS = range(0, 101, 20)  # percent


class Matrix(NamedTuple):
    """A confusion matrix, or the part of a large one that is shown."""

    names: list[str]
    """Of its classes, and "others" for a last column."""
    counts: NDArray[Any]
    """int64[classes, names]: images by their class and the guess."""
    which: str
    """A remark on the part, or ""."""

    def cells(self, row: int) -> Iterator[tuple[int, float, bool]]:
        """Count, share of the row, and whether the guess is right, column by column."""
        counts = self.counts[row].tolist()
        for column, count in enumerate(counts):
            yield count, count / max(sum(counts), 1), column == row


def confusion_matrix(
    recorded: Recorded, num_classes: int, name: Callable[[int], str]
) -> Matrix | None:
    """Of many classes, that of those in the most frequent confusions; None without any."""
    scores: Predictions = recorded.scores
    if num_classes <= WHOLE:
        classes = list(range(num_classes))
        counts = pair_counts(scores, recorded.labels, classes)[:, :num_classes]
        return Matrix([name(label) for label in classes], counts, "")
    pairs = confusions(scores, recorded.labels, _PART)
    classes = [*dict.fromkeys(label for pair in pairs for label in (pair.label, pair.guess))][
        :_PART
    ]
    which = f", for the {len(classes)} of {num_classes:,} classes that are confused most often"
    names = [*map(name, classes), "others"]
    return Matrix(names, pair_counts(scores, recorded.labels, classes), which) if classes else None


def matrix_table(matrix: Matrix) -> Html:
    """The matrix as a table; each cell has its count, its share of the row, and a shade by it."""
    rows: list[list[Child]] = []
    for number, counts in enumerate(matrix.counts):
        of = tag("span", f"{counts.sum():,}", class_="detail")
        rows.append([join(matrix.names[number], " ", of), *map(_cell, matrix.cells(number))])
    caption = f"Images by their class (rows) and the model's guess (columns){matrix.which}"
    many = " many" if len(matrix.names) > FEW else ""
    head = ["", *(tag("span", name) for name in matrix.names)]
    return table(head, rows, caption=caption, numbers=1, class_=f"matrix{many}")


def _cell(cell: tuple[int, float, bool]) -> Html | None:
    count, share, is_right = cell
    if not count:
        return None
    kind = "hit" if is_right else "miss"
    parts = f"{count:,} ", tag("small", f"{share:.0%}")
    return tag("span", *parts, class_=f"{kind} shade{shade_of(share)}")


def shade_of(share: float) -> int:
    """The shade of a cell, 0 to 4; the style sheet has their strengths."""
    return sum(share > least for least in _SHADES)


def confidence_section(scores: Predictions, temperature: float) -> Html:
    """The reliability diagram, with its values as a table.

    `temperature`: that of the checkpoint, which the saved predictions are without.
    """
    rows = [row for row in reliability(scores) if row.samples]
    is_read = scores.is_read()
    confidence, accuracy = (
        scores.confidence[is_read].mean(),
        (scores.rank_of_truth[is_read] == 1).mean(),
    )
    text = (
        f"On average the model is {confidence:.1%} sure of its guesses, and {accuracy:.1%} of them "
        f"are right. Expected calibration error: {calibration_error(scores):.4f} (15 bins)."
    )
    if temperature != 1:
        text += (
            f" These confidences are before the temperature of {temperature:g} that the checkpoint "
            "has: trainyard evaluate --out FOLDER has those after it, which are predict's."
        )
    cells: list[list[Child]] = [
        [
            f"{row.low:.0%} to {row.high:.0%}",
            f"{row.samples:,}",
            f"{row.confidence:.1%}",
            f"{row.accuracy:.1%}",
        ]
        for row in rows
    ]
    head = ["Confidence", "Images", "Mean confidence", "Right"]
    values = table(head, cells, caption="Right guesses by confidence", numbers=1)
    return join(about(text), tag("div", _diagram(rows), values, class_="beside"))


def _diagram(rows: list[Bin]) -> Html:
    """Bars of accuracy by confidence, and the diagonal of perfect calibration."""
    bars: list[Html] = []
    for row in rows:
        tip = f"{row.accuracy:.1%} of {row.samples:,} images are right, {row.confidence:.1%} sure"
        high, width = _SIDE * row.accuracy, _SIDE * (row.high - row.low) - 1
        box = {"x": _SIDE * row.low + 0.5, "y": _SIDE - high, "width": width, "height": high}
        bars.append(tag("rect", tag("title", tip), **box, class_="bar"))
    lines = (
        tag("line", x1=0, y1=_SIDE - share, x2=_SIDE, y2=_SIDE - share, class_="grid")
        for share in _TICKS[1:]
    )
    diagonal = tag("line", x1=0, y1=_SIDE, x2=_SIDE, y2=0, class_="diagonal")
    return drawing(
        [*lines, *bars, diagonal],
        (_SIDE, _SIDE),
        label="Reliability diagram: share of right guesses by confidence",
        caption="Share of right guesses (up) by confidence (across); calibrated, bars end at the "
        "line",
        class_="wide reliability",
        height=tag("div", *(tag("span", f"{share}%") for share in _TICKS[::-1]), class_="height"),
    )


def drawing(
    shapes: Iterable[Html],
    size: tuple[int, int],
    *,
    label: str,
    caption: str,
    class_: str = "wide",
    height: Html | None = None,
) -> Html:
    """Shapes in a box of a width and a height, over a scale of 0 to 100%; `height`: of heights."""
    frame = {"viewBox": f"0 0 {size[0]} {size[1]}", "preserveAspectRatio": "none"}
    svg = tag("svg", *shapes, **frame, role="img", aria_label=label)
    scale = tag("div", *(tag("span", f"{share}%") for share in _TICKS), class_="scale")
    return tag("figure", tag("figcaption", caption), height, svg, scale, class_=class_)
