"""Confusion matrix and reliability diagram of a run's saved predictions."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from numpy.typing import NDArray

from trainyard.report.markup import Child, Html, about, join, table, tag
from trainyard.training.predictions import Predictions, confusions, pair_counts
from trainyard.training.recorded import Recorded
from trainyard.training.reliability import Bin, calibration_error, reliability

_WHOLE, _PART = 25, 16  # classes of a whole matrix, and of the part that is shown of a larger one
_SHADES = 0.0, 0.02, 0.1, 0.3  # shares of a class above which a cell is darker
_SIDE = 100  # units of the diagram


def matrix(recorded: Recorded, num_classes: int, name: Callable[[int], str]) -> Html | None:
    """The confusion matrix; of many classes, of those in the most frequent confusions."""
    scores: Predictions = recorded.scores
    classes, which = list(range(num_classes)), ""
    if num_classes > _WHOLE:
        pairs = confusions(scores, recorded.labels, _PART)
        labels = dict.fromkeys(label for pair in pairs for label in (pair.label, pair.guess))
        classes = list(labels)[:_PART]
        which = f", for the {len(classes)} of {num_classes:,} classes that are confused most often"
    if not classes:
        return None
    counts = pair_counts(scores, recorded.labels, classes)
    head = ["", *map(name, classes), *(["others"] if which else [])]
    rows: list[list[Child]] = [
        [name(label), *_cells(number, counts[number, : len(head) - 1])]
        for number, label in enumerate(classes)
    ]
    text = f"Images by their class (rows) and the model's guess (columns){which}."
    full_table = table(head, rows, caption="Confusion matrix", numbers=1, class_="matrix")
    return join(about(text), full_table)


def _cells(number: int, counts: NDArray[Any]) -> Iterator[Html]:
    """Shaded by the share of the row."""
    total = max(int(counts.sum()), 1)
    for column, count in enumerate(counts.tolist()):
        shade = sum(count / total > least for least in _SHADES)
        kind = "hit" if column == number else "miss"
        yield tag("span", f"{count:,}" if count else "", class_=f"{kind} shade{shade}")


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
    diagonal = tag("line", x1=0, y1=_SIDE, x2=_SIDE, y2=0, class_="diagonal")
    return drawing(
        [*bars, diagonal],
        (_SIDE, _SIDE),
        label="Reliability diagram: share of right guesses by confidence",
        caption="Right guesses by confidence, 0 to 100%; calibrated, bars end at the line",
        class_="wide reliability",
    )


def drawing(
    shapes: Iterable[Html], size: tuple[int, int], *, label: str, caption: str, class_: str = "wide"
) -> Html:
    """Shapes in a box of a width and a height, over a scale from 0 to 100%."""
    frame = {"viewBox": f"0 0 {size[0]} {size[1]}", "preserveAspectRatio": "none"}
    svg = tag("svg", *shapes, **frame, role="img", aria_label=label)
    scale = tag("div", *(tag("span", f"{share}%") for share in range(0, 101, 20)), class_="scale")
    return tag("figure", tag("figcaption", caption), svg, scale, class_=class_)
