"""Sections on a run's saved predictions: classes, confused classes and the worst errors.

Images have one label, or lists of labels.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.printable import how_many
from trainyard.report.judgement import (
    Matrix,
    confidence_section,
    confusion_matrix,
    drawing,
    matrix_table,
)
from trainyard.report.markup import Child, Html, about, join, switch, table, tag
from trainyard.report.pictures import Album
from trainyard.report.runs import Run, temperature_of
from trainyard.training.label_scores import LabelScores
from trainyard.training.predictions import Confusion, Predictions, confusions, per_class
from trainyard.training.recorded import Recorded

_FEW_CLASSES = 60  # so many need no histogram
_WORST_CLASSES = 25  # rows of the table without a script
_BINS = 20  # histogram bins
_PAIRS, _EXAMPLES = 12, 4
_ERRORS = 12  # highest losses shown, and as many of the highest confidences
_RIGHT = 12

Section = tuple[str, str, Html]  # id, title and content
_ORDER = switch("order", "Order by", {"loss": "Loss", "confidence": "Confidence"})
TABLES = ("classes", "confidence")  # sections without pictures
Ids = NDArray[np.int64]
_ClassRow = tuple[str, int, tuple[float, ...]]  # name, images, and shares of 1


def predictions_sections(
    run: Run, recorded: Recorded, album: Album
) -> tuple[list[Section], dict[str, Any]]:
    """The sections, and the classes as data for page.js; both empty if no image could be read."""
    scores = recorded.scores
    if not scores.is_read().any():
        return [], {}
    has_lists = isinstance(scores, LabelScores)
    classes, data = (_listed_classes if has_lists else _classes)(run, recorded)
    sections = [
        ("errors", "Worst errors", _errors(run, recorded, album)),
        ("right", "Right predictions", _right(run, recorded, album)),
        ("classes", "Classes", classes),
    ]
    if not has_lists:
        confidence = confidence_section(scores, temperature_of(run, recorded.weights))
        sections.insert(0, ("confusions", "Confused classes", _confusions(run, recorded, album)))
        sections.append(("confidence", "Confidence", confidence))
    note = tag("p", album.why_none, class_="note") if album.why_none else None
    name, title, content = sections[0]
    return [(name, title, join(note, content)), *sections[1:]], data


def _class_name(run: Run, label: int) -> str:
    """The name of a class, or its number."""
    return run.classes[label] if 0 <= label < len(run.classes) else f"class {label}"


# --- classes ---


def _num_classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count:,} classes"


def _classes(run: Run, recorded: Recorded) -> tuple[Html, dict[str, Any]]:
    """A histogram of many classes, and their table."""
    k = 4 if run.shows_top5 else 3
    rows: list[_ClassRow] = [
        (
            _class_name(run, row.label),
            row.samples,
            (row.recall, row.precision, row.f1, row.top5)[:k],
        )
        for row in per_class(recorded.scores, recorded.labels)
    ]
    top1 = np.array([shares[0] for *_, shares in rows])
    text = (
        f"{_num_classes(len(rows))}; the median is recognised in {np.median(top1):.1%} of its "
        f"images, a tenth of the classes in {np.quantile(top1, 0.1):.1%} or fewer."
    )
    head = ["Class", "Images", *("Recall", "Precision", "F1", "Top-5")[:k]]
    columns, data = _class_table(head, rows)
    histogram = _histogram(top1) if len(rows) > _FEW_CLASSES else None
    return join(about(text), histogram, columns), data


def _listed_classes(run: Run, recorded: Recorded) -> tuple[Html, dict[str, Any]]:
    """The table of classes of images with lists of labels."""
    rows: list[_ClassRow] = [
        (_class_name(run, row.label), row.samples, (row.average_precision, row.f1))
        for row in recorded.scores.per_class(recorded.labels)
        if row.samples
    ]
    text = (
        f"{_num_classes(len(rows))}. F1 is of the images that have the class and those that the "
        "model gives a probability above 50%."
    )
    columns, data = _class_table(["Class", "Images", "Average precision", "F1"], rows)
    return join(about(text), columns), data


def _class_table(head: list[str], rows: list[_ClassRow]) -> tuple[Html, dict[str, Any]]:
    """The place of the table that page.js makes, with the worst classes for those without it."""
    body: list[list[Child]] = [
        [name, f"{images:,}", *(f"{share:.1%}" for share in shares)]
        for name, images, shares in rows[:_WORST_CLASSES]
    ]
    caption = f"The {len(body)} worst of {len(rows):,} classes; the full table needs JavaScript"
    worst = table(head, body, caption=caption, numbers=1)
    data = [(name, images, *(round(of, 4) for of in shares)) for name, images, shares in rows]
    container = tag("div", tag("noscript", worst), id="classes-table")
    return container, {"classes": data, "class_columns": head}


def _histogram(top1: NDArray[np.float64]) -> Html:
    """Number of classes by their top-1 accuracy; a bar's tooltip names its count."""
    counts = np.histogram(top1, _BINS, (0, 1))[0].tolist()
    bars = []
    for n, count in enumerate(counts):
        tip = tag(
            "title", f"{_num_classes(count)} between {n / _BINS:.0%} and {(n + 1) / _BINS:.0%}"
        )
        box = {"x": n + 0.04, "y": max(counts) - count, "width": 0.92, "height": count}
        bars.append(tag("rect", tip, **box, class_="bar"))
    label = f"Classes by top-1 accuracy: {int((top1 < 0.5).sum())} of {len(top1)} below 50%"
    caption = f"Number of classes by their top-1 accuracy; the highest bar has {max(counts):,}"
    return drawing(bars, (_BINS, max(counts)), label=label, caption=caption)


# --- errors ---


def matrix_of(run: Run, recorded: Recorded) -> Matrix | None:
    """The confusion matrix of a run's predictions, with the names of its classes."""
    num_classes = int(max(recorded.labels.max(), recorded.scores.guess.max())) + 1
    num_classes = max(num_classes, len(run.classes))
    return confusion_matrix(recorded, num_classes, partial(_class_name, run))


def _confusions(run: Run, recorded: Recorded, album: Album) -> Html:
    """The matrix; of many classes, of which it shows a part, the most frequent confusions too."""
    scores: Predictions = recorded.scores
    pairs = confusions(scores, recorded.labels, _PAIRS)
    matrix, count = matrix_of(run, recorded), int(scores.is_read().sum())
    table_of_matrix = matrix_table(matrix) if matrix else None
    if not pairs:
        text = f"None of {how_many(count, 'image')} is taken for another class."
        return join(about(text), table_of_matrix)
    num_wrong, (first, *_) = int(scores.is_other().sum()), pairs
    total = int((scores.is_read() & (recorded.labels == first.label)).sum())
    often, share = (
        (", most often", f" ({first.samples:,} of {total:,})") if num_wrong > 1 else (":", "")
    )
    verb = "is" if num_wrong == 1 else "are"
    text = (
        f"{num_wrong:,} of {how_many(count, 'image')} {verb} taken for another class{often} "
        f"{_class_name(run, first.label)} for {_class_name(run, first.guess)}{share}."
    )
    listed = _pairs(run, recorded, album, pairs) if matrix and matrix.which else None
    return join(about(text), table_of_matrix, listed)


def _pairs(run: Run, recorded: Recorded, album: Album, pairs: list[Confusion]) -> Html:
    """Pairs of classes with their most confident errors."""
    scores: Predictions = recorded.scores
    examples = []
    for pair in pairs:
        is_pair = (recorded.labels == pair.label) & (scores.guess == pair.guess) & scores.is_read()
        examples.append(_highest(scores.confidence, np.flatnonzero(is_pair), _EXAMPLES))
    album.load(sample for samples in examples for sample in samples)
    rows, totals = [], np.bincount(recorded.labels[scores.is_read()])
    for pair, samples in zip(pairs, examples, strict=True):
        label, guess = _class_name(run, pair.label), _class_name(run, pair.guess)
        total = int(totals[pair.label])
        share = f"{pair.samples:,} of {how_many(total, 'image')}, {pair.samples / total:.0%}"
        names = tag("p", tag("b", label), " taken for ", tag("b", guess))
        pictures = [_picture(album, sample, f"{label}, taken for {guess}") for sample in samples]
        strip = tag("div", *pictures, class_="strip") if any(pictures) else None
        rows.append(tag("li", tag("div", names, tag("p", share, class_="detail")), strip))
    return tag("ul", *rows, class_="pairs")


def worst_errors(recorded: Recorded) -> tuple[list[int], Ids]:
    """Samples with the highest loss or, of one label, the most confident guess; and all errors."""
    scores = recorded.scores
    if isinstance(scores, LabelScores):
        losses = np.nan_to_num(scores.losses(recorded.labels), nan=np.inf).astype(np.float32)
        wrong = np.flatnonzero(((scores.logits.T > 0) != recorded.labels).any(axis=1) & scores.read)
        return _highest(losses, wrong, 2 * _ERRORS), wrong
    wrong = np.flatnonzero(scores.is_other())
    chosen = {*_highest(scores.loss, wrong, _ERRORS), *_highest(scores.confidence, wrong, _ERRORS)}
    return _highest(scores.loss, np.array(sorted(chosen), np.int64), len(chosen)), wrong


def labels_of(run: Run, recorded: Recorded, sample: int) -> tuple[str, str]:
    """The names of a sample's label and of the guess; of lists, of all."""
    labels, scores = recorded.labels[sample], recorded.scores
    if isinstance(scores, LabelScores):
        return _names(run, labels), _names(run, scores.logits[:, sample] > 0)
    return _class_name(run, int(labels)), _class_name(run, int(scores.guess[sample]))


def _names(run: Run, chosen: NDArray[np.bool_]) -> str:
    return ", ".join(_class_name(run, n) for n in np.flatnonzero(chosen).tolist()) or "none"


def _errors(run: Run, recorded: Recorded, album: Album) -> Html:
    """The worst errors: images with another guess, or with wrong or missing labels."""
    samples, wrong = worst_errors(recorded)
    if not samples:
        return about("Every validation image is recognised.")
    album.load(samples)
    has_lists = isinstance(recorded.scores, LabelScores)
    tell = _listed_error if has_lists else _error
    order = None if has_lists or len(samples) == 1 else _ORDER
    tiles = [tell(run, recorded, album, n) for n in samples]
    text = _shown(samples, wrong, "have the highest loss or the most confident guess")
    if has_lists:
        count = how_many(int(recorded.scores.read.sum()), "image")
        text = f"{len(wrong):,} of {count} have a wrong or a missing label. "
        text += _shown(samples, wrong, "have the highest loss")
    text += " Red is where the model finds its guess (Grad-CAM)." if album.overlay else ""
    return _gallery(text, tiles, album, samples, order=order, id="errors-grid")


def _error(run: Run, recorded: Recorded, album: Album, n: int) -> Html:
    label, guess = labels_of(run, recorded, n)
    confidence, loss = (float(of[n]) for of in (recorded.scores.confidence, recorded.scores.loss))
    lines = (
        line("is ", label),
        line("taken for ", guess, class_="wrong"),
        tag("p", f"{confidence:.0%} sure, loss {loss:.2f}", class_="detail"),
    )
    keys = {"data_loss": f"{loss:.4g}", "data_confidence": f"{confidence:.4g}"}
    number = int(recorded.scores.guess[n])
    return tile(album, n, f"{label}, taken for {guess}", *lines, label=number, **keys)


def _listed_error(run: Run, recorded: Recorded, album: Album, n: int) -> Html:
    truth, guessed = recorded.labels[n], recorded.scores.logits[:, n] > 0
    missed, extra = truth & ~guessed, guessed & ~truth
    lines = (
        line("has ", _names(run, truth)),
        line("missed ", _names(run, missed)) if missed.any() else None,
        line("wrongly ", _names(run, extra), class_="wrong") if extra.any() else None,
    )
    return tile(album, n, f"has {_names(run, truth)}", *lines)


def _shown(samples: list[int], of: Ids, which: str) -> str:
    if len(samples) == len(of):
        return f"All {len(of):,} of them." if len(of) > 1 else "The only one."
    return f"The {len(samples)} of {len(of):,} that {which}."


def _gallery(
    text: str,
    tiles: list[Html],
    album: Album,
    samples: list[int],
    *,
    order: Html | None = None,
    **attributes: str,
) -> Html:
    """Tiles of samples, and the paths of all of them."""
    paths = "\n".join(filter(None, map(album.path, samples)))
    summary = tag("summary", "Paths of these images")
    listed = tag("details", summary, tag("pre", paths)) if paths else None
    return join(about(text), order, tag("ul", *tiles, class_="tiles", **attributes), listed)


def _right(run: Run, recorded: Recorded, album: Album) -> Html:
    """Images without an error, evenly from the least to the most sure."""
    scores, labels = recorded.scores, recorded.labels
    if isinstance(scores, LabelScores):
        right = np.flatnonzero(((scores.logits.T > 0) == labels).all(axis=1) & scores.read)
        sure = -scores.losses(labels)
    else:
        right, sure = np.flatnonzero(scores.rank_of_truth == 1), scores.confidence
    if not len(right):
        return about("None.")
    right = right[np.argsort(sure[right], kind="stable")]
    chosen = np.linspace(0, len(right) - 1, min(_RIGHT, len(right))).round().astype(np.int64)
    samples = [int(n) for n in right[chosen]]
    album.load(samples)
    tiles = []
    for n in samples:
        names, _ = labels_of(run, recorded, n)
        share = tag("p", f"{sure[n]:.0%} sure", class_="detail") if labels.ndim == 1 else None
        tiles.append(tile(album, n, names, line("is ", names), share))
    text = _shown(samples, right, "stand for all, from the least to the most sure one")
    text += " Red is where the model finds the class (Grad-CAM)." if album.overlay else ""
    return _gallery(text, tiles, album, samples)


def _highest(column: NDArray[np.float32], samples: NDArray[np.int64], count: int) -> list[int]:
    """The samples with the highest values, the highest first."""
    return [int(n) for n in samples[np.argsort(-column[samples], kind="stable")][:count]]


def tile(
    album: Album,
    sample: int,
    alt: str,
    *lines: Html | None,
    label: int | None = None,
    **attributes: str,
) -> Html:
    """An image with its description, number and file, and where a class is found in it.

    `label` is the number of that class; None for the likeliest.
    """
    picture = _picture(album, sample, alt) or tag("span", "no picture", class_="no-picture")
    shown = tag("div", picture, class_="picture")
    if uri := album.map_uri(sample, label):
        where = tag("img", src=uri, alt=f"{alt}: where it is found")
        shown = tag("div", shown, tag("div", where, class_="picture"), class_="pair")
    path = album.path(sample)
    copied = tag("button", Path(path).name, type="button", class_="file", title=path)
    name = tag("p", f"#{sample} ", copied if path else None, class_="detail")
    return tag("li", shown, *lines, name, **attributes)


def line(what: str, names: str, class_: str | None = None) -> Html:
    return tag("p", tag("span", what, class_="detail"), tag("b", names, class_=class_))


def _picture(album: Album, sample: int, alt: str) -> Html | None:
    """A loaded thumbnail; None for an unreadable image."""
    uri = album.uri(sample)
    if uri is None:
        return None
    return tag("img", src=uri, alt=alt, class_="small" if "image/png" in uri[:20] else None)
