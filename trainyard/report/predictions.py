"""Sections on a run's saved predictions: classes, confused classes and the worst errors."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.report.markup import Child, Html, about, join, switch, table, tag
from trainyard.report.pictures import Album
from trainyard.report.runs import Run
from trainyard.training.averages import label_of
from trainyard.training.predictions import ClassAccuracy, Predictions, confusions, per_class
from trainyard.training.recorded import Recorded

_FEW_CLASSES = 60  # so many need no histogram
WORST_CLASSES = 25  # rows of the table without a script
_BINS = 20  # histogram bins
_PAIRS, _EXAMPLES = 12, 4
ERRORS = 24  # highest losses shown, and as many of the highest confidences

COLUMNS = ("Class", "Images", "Top-1", "Top-5")
Section = tuple[str, str, Html]  # id, title and content


def predictions_sections(
    run: Run, recorded: Recorded, said: Predictions, album: Album
) -> tuple[list[Section], list[list[Any]]]:
    """The sections, and the classes as data for page.js: name, images, top-1, top-5.

    Both are empty if no image could be read.
    """
    rows = per_class(said, recorded.labels)
    if not rows:
        return [], []
    data = [
        [class_name(run, row.label), row.samples, round(row.top1, 4), round(row.top5, 4)]
        for row in rows
    ]
    confused = _confusions(run, recorded, said, album)
    errors = _errors(run, recorded, said, album)
    note = tag("p", album.why_none, class_="note") if album.why_none else None
    sections = [
        ("classes", "Classes", join(source(recorded), _classes(run, rows))),
        ("confusions", "Confused classes", join(note, confused)),
        ("errors", "Worst errors", errors),
    ]
    return sections, data


def source(recorded: Recorded) -> Html:
    """A sentence about the weights that made the predictions."""
    which = f"moving average ({label_of(recorded.weights)})" if recorded.weights else "model"
    return about(f"Predictions of the {which} at step {recorded.step:,}, its best evaluation.")


def class_name(run: Run, label: int) -> str:
    """The name of a class, or its number."""
    return run.classes[label] if 0 <= label < len(run.classes) else f"class {label}"


def _classes(run: Run, rows: list[ClassAccuracy]) -> Html:
    """A histogram of many classes, and the place of the table that page.js makes."""
    top1 = np.array([row.top1 for row in rows])
    text = (
        f"{len(rows):,} classes; the median is recognised in {np.median(top1):.1%} of its images, "
        f"a tenth of the classes in {np.quantile(top1, 0.1):.1%} or fewer."
    )
    body: list[list[Child]] = [
        [class_name(run, row.label), f"{row.samples:,}", f"{row.top1:.1%}", f"{row.top5:.1%}"]
        for row in rows[:WORST_CLASSES]
    ]
    caption = f"The {len(body)} worst of {len(rows):,} classes; the full table needs JavaScript"
    worst = table([*COLUMNS], body, caption=caption, numbers=1)
    return join(
        about(text),
        _histogram(top1) if len(rows) > _FEW_CLASSES else None,
        tag("div", tag("noscript", worst), id="classes-table"),
    )


def _histogram(top1: NDArray[np.float64]) -> Html:
    """Number of classes by their top-1 accuracy; a bar's tooltip names its count."""
    counts = np.histogram(top1, _BINS, (0, 1))[0].tolist()
    bars = []
    for n, count in enumerate(counts):
        tip = tag("title", f"{count:,} classes between {n / _BINS:.0%} and {(n + 1) / _BINS:.0%}")
        place = {"x": n + 0.04, "y": max(counts) - count, "width": 0.92, "height": count}
        bars.append(tag("rect", tip, **place, class_="bar"))
    label = f"Classes by top-1 accuracy: {int((top1 < 0.5).sum())} of {len(top1)} below 50%"
    frame = {"viewBox": f"0 0 {_BINS} {max(counts)}", "preserveAspectRatio": "none"}
    return tag(
        "figure",
        tag(
            "figcaption",
            f"Number of classes by their top-1 accuracy; the highest bar has {max(counts):,}",
        ),
        tag("svg", *bars, **frame, role="img", aria_label=label),
        tag("div", *(tag("span", f"{share}%") for share in range(0, 101, 20)), class_="scale"),
        class_="wide",
    )


def _confusions(run: Run, recorded: Recorded, said: Predictions, album: Album) -> Html:
    pairs = confusions(said, recorded.labels, _PAIRS)
    if not pairs:
        return about("No image is taken for another class.")
    totals = np.bincount(recorded.labels[said.is_read()])
    examples = []
    for pair in pairs:  # their most confident errors
        is_pair = (recorded.labels == pair.label) & (said.guess == pair.guess) & said.is_read()
        examples.append(highest(said.confidence, np.flatnonzero(is_pair), _EXAMPLES))
    album.load(sample for samples in examples for sample in samples)
    rows = []
    for pair, samples in zip(pairs, examples, strict=True):
        label, guess = class_name(run, pair.label), class_name(run, pair.guess)
        total = totals[pair.label]
        share = f"{pair.samples:,} of {total:,} images, {pair.samples / total:.0%}"
        names = tag("p", tag("b", label), " taken for ", tag("b", guess))
        pictures = [picture(album, sample, f"{label}, taken for {guess}") for sample in samples]
        strip = tag("div", *pictures, class_="strip") if any(pictures) else None
        rows.append(tag("li", tag("div", names, tag("p", share, class_="detail")), strip))
    return tag("ul", *rows, class_="pairs")


def highest(column: NDArray[np.float32], samples: NDArray[np.int64], count: int) -> list[int]:
    """The samples with the highest values, the highest first."""
    return [int(n) for n in samples[np.argsort(-column[samples], kind="stable")][:count]]


def _errors(run: Run, recorded: Recorded, said: Predictions, album: Album) -> Html:
    wrong = np.flatnonzero(said.is_read() & (said.place > 1) & (said.guess >= 0))
    if not len(wrong):
        return about("Every validation image is recognised.")
    chosen = {*highest(said.loss, wrong, ERRORS), *highest(said.confidence, wrong, ERRORS)}
    samples = highest(said.loss, np.array(sorted(chosen)), len(chosen))
    album.load(samples)
    text = (
        f"{len(wrong):,} of {int(said.is_read().sum()):,} validation images are taken for another "
        f"class. Shown are the {len(samples)} with the highest loss or the most confident guess."
    )
    order = switch("order", "Order by", {"loss": "Loss", "confidence": "Confidence"})
    tiles = (_tile(run, recorded, said, sample, album=album) for sample in samples)
    return join(about(text), order, tag("ul", *tiles, class_="tiles", id="errors-grid"))


def _tile(run: Run, recorded: Recorded, said: Predictions, sample: int, *, album: Album) -> Html:
    label = class_name(run, int(recorded.labels[sample]))
    guess = class_name(run, int(said.guess[sample]))
    confidence, loss = float(said.confidence[sample]), float(said.loss[sample])
    image = picture(album, sample, f"{label}, taken for {guess}")
    where = f"#{sample} {album.file(sample)}".strip()
    return tag(
        "li",
        tag("div", image or tag("span", "no picture", class_="no-picture"), class_="picture"),
        tag("p", tag("span", "is ", class_="detail"), tag("b", label)),
        tag("p", tag("span", "taken for ", class_="detail"), tag("b", guess, class_="wrong")),
        tag("p", f"{confidence:.0%} sure, loss {loss:.2f}", class_="detail"),
        tag("p", where, class_="detail file", title=where),
        data_loss=f"{loss:.4g}",
        data_confidence=f"{confidence:.4g}",
    )


def picture(album: Album, sample: int, alt: str) -> Html | None:
    """A loaded thumbnail; None for an unreadable image."""
    uri = album.uri(sample)
    if uri is None:
        return None
    return tag("img", src=uri, alt=alt, class_="small" if "image/png" in uri[:20] else None)
