"""Sections on a run's saved predictions: classes, confused classes and the worst errors.

Images have one label, or lists of labels.
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.report.judgement import confidence_section, drawing, matrix
from trainyard.report.markup import Child, Html, about, join, switch, table, tag
from trainyard.report.pictures import Album
from trainyard.report.runs import Run, temperature_of
from trainyard.training.label_scores import LabelScores
from trainyard.training.predictions import Predictions, confusions, per_class
from trainyard.training.recorded import Recorded
from trainyard.training.weight_names import label_of

_FEW_CLASSES = 60  # so many need no histogram
_WORST_CLASSES = 25  # rows of the table without a script
_BINS = 20  # histogram bins
_PAIRS, _EXAMPLES = 12, 4
_ERRORS = 24  # highest losses shown, and as many of the highest confidences

Section = tuple[str, str, Html]  # id, title and content
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
    confused = confidence = None
    if not has_lists:
        confused = _confusions(run, recorded, album)
        confidence = confidence_section(scores, temperature_of(run, recorded.weights))
    errors = (_listed_errors if has_lists else _errors)(run, recorded, album)
    note = tag("p", album.why_none, class_="note") if album.why_none else None
    which = f"moving average ({label_of(recorded.weights)})" if recorded.weights else "model"
    source = f"Predictions of the {which} at step {recorded.step:,}, its best evaluation."
    sections = [
        ("classes", "Classes", join(about(source), classes)),
        *([("confusions", "Confused classes", join(note, confused))] if confused else []),
        ("errors", "Worst errors", join(None if confused else note, errors)),
        *([("confidence", "Confidence", confidence)] if confidence else []),
    ]
    return sections, data


def _class_name(run: Run, label: int) -> str:
    """The name of a class, or its number."""
    return run.classes[label] if 0 <= label < len(run.classes) else f"class {label}"


# --- classes ---


def _classes(run: Run, recorded: Recorded) -> tuple[Html, dict[str, Any]]:
    """A histogram of many classes, and their table."""
    rows: list[_ClassRow] = [
        (_class_name(run, row.label), row.samples, (row.recall, row.precision, row.f1, row.top5))
        for row in per_class(recorded.scores, recorded.labels)
    ]
    top1 = np.array([shares[0] for *_, shares in rows])
    text = (
        f"{len(rows):,} classes; the median is recognised in {np.median(top1):.1%} of its images, "
        f"a tenth of the classes in {np.quantile(top1, 0.1):.1%} or fewer."
    )
    columns, data = _class_table(["Class", "Images", "Recall", "Precision", "F1", "Top-5"], rows)
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
        f"{len(rows):,} classes. F1 is of the images that have the class and those that the model "
        "gives a probability above 50%."
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
        tip = tag("title", f"{count:,} classes between {n / _BINS:.0%} and {(n + 1) / _BINS:.0%}")
        box = {"x": n + 0.04, "y": max(counts) - count, "width": 0.92, "height": count}
        bars.append(tag("rect", tip, **box, class_="bar"))
    label = f"Classes by top-1 accuracy: {int((top1 < 0.5).sum())} of {len(top1)} below 50%"
    caption = f"Number of classes by their top-1 accuracy; the highest bar has {max(counts):,}"
    return drawing(bars, (_BINS, max(counts)), label=label, caption=caption)


# --- errors ---


def _confusions(run: Run, recorded: Recorded, album: Album) -> Html:
    scores: Predictions = recorded.scores
    pairs = confusions(scores, recorded.labels, _PAIRS)
    if not pairs:
        return about("No image is taken for another class.")
    num_classes = int(max(recorded.labels.max(), scores.guess.max())) + 1
    full_matrix = matrix(recorded, max(num_classes, len(run.classes)), partial(_class_name, run))
    totals = np.bincount(recorded.labels[scores.is_read()])
    examples = []
    for pair in pairs:  # their most confident errors
        is_pair = (recorded.labels == pair.label) & (scores.guess == pair.guess) & scores.is_read()
        examples.append(_highest(scores.confidence, np.flatnonzero(is_pair), _EXAMPLES))
    album.load(sample for samples in examples for sample in samples)
    rows = []
    for pair, samples in zip(pairs, examples, strict=True):
        label, guess = _class_name(run, pair.label), _class_name(run, pair.guess)
        total = totals[pair.label]
        share = f"{pair.samples:,} of {total:,} images, {pair.samples / total:.0%}"
        names = tag("p", tag("b", label), " taken for ", tag("b", guess))
        pictures = [_picture(album, sample, f"{label}, taken for {guess}") for sample in samples]
        strip = tag("div", *pictures, class_="strip") if any(pictures) else None
        rows.append(tag("li", tag("div", names, tag("p", share, class_="detail")), strip))
    return join(full_matrix, tag("ul", *rows, class_="pairs"))


def _errors(run: Run, recorded: Recorded, album: Album) -> Html:
    scores: Predictions = recorded.scores
    wrong = np.flatnonzero(scores.is_read() & (scores.rank_of_truth > 1) & (scores.guess >= 0))
    if not len(wrong):
        return about("Every validation image is recognised.")
    chosen = {*_highest(scores.loss, wrong, _ERRORS), *_highest(scores.confidence, wrong, _ERRORS)}
    samples = _highest(scores.loss, np.array(sorted(chosen)), len(chosen))
    album.load(samples)
    text = (
        f"{len(wrong):,} of {int(scores.is_read().sum()):,} validation images are taken for "
        f"another class. Shown are the {len(samples)} with the highest loss or the most confident "
        "guess."
    )
    text += " Red is where the model finds the other class (Grad-CAM)." if album.overlay else ""
    order = switch("order", "Order by", {"loss": "Loss", "confidence": "Confidence"})
    tiles = []
    for n in samples:
        label, guess = (_class_name(run, int(of[n])) for of in (recorded.labels, scores.guess))
        confidence, loss = float(scores.confidence[n]), float(scores.loss[n])
        lines = (
            line("is ", label),
            line("taken for ", guess, class_="wrong"),
            tag("p", f"{confidence:.0%} sure, loss {loss:.2f}", class_="detail"),
        )
        keys = {"data_loss": f"{loss:.4g}", "data_confidence": f"{confidence:.4g}"}
        alt = f"{label}, taken for {guess}"
        tiles.append(tile(album, n, alt, *lines, label=int(scores.guess[n]), **keys))
    return join(about(text), order, tag("ul", *tiles, class_="tiles", id="errors-grid"))


def _listed_errors(run: Run, recorded: Recorded, album: Album) -> Html:
    """The images with the highest loss among those with a wrong or a missing label."""
    scores: LabelScores = recorded.scores
    losses = np.nan_to_num(scores.losses(recorded.labels), nan=np.inf).astype(np.float32)
    wrong = np.flatnonzero(((scores.logits.T > 0) != recorded.labels).any(axis=1) & scores.read)
    if not len(wrong):
        return about("Every label of the validation images is predicted, and no other.")
    samples = _highest(losses, wrong, _ERRORS)
    album.load(samples)
    text = (
        f"{len(wrong):,} of {int(scores.read.sum()):,} validation images have a wrong or a missing "
        f"label. Shown are the {len(samples)} with the highest loss."
    )
    text += " Red is where the model finds the likeliest label (Grad-CAM)." if album.overlay else ""

    def names(chosen: NDArray[np.bool_]) -> str:
        return ", ".join(_class_name(run, n) for n in np.flatnonzero(chosen).tolist()) or "none"

    tiles = []
    for n in samples:
        truth, guessed = recorded.labels[n], scores.logits[:, n] > 0
        missed, extra = truth & ~guessed, guessed & ~truth
        lines = (
            line("has ", names(truth)),
            line("missed ", names(missed)) if missed.any() else None,
            line("wrongly ", names(extra), class_="wrong") if extra.any() else None,
        )
        tiles.append(tile(album, n, f"has {names(truth)}", *lines))
    return join(about(text), tag("ul", *tiles, class_="tiles", id="errors-grid"))


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
    file = f"#{sample} {album.file(sample)}".strip()
    name = tag("p", file, class_="detail file", title=file)
    return tag("li", shown, *lines, name, **attributes)


def line(what: str, names: str, class_: str | None = None) -> Html:
    return tag("p", tag("span", what, class_="detail"), tag("b", names, class_=class_))


def _picture(album: Album, sample: int, alt: str) -> Html | None:
    """A loaded thumbnail; None for an unreadable image."""
    uri = album.uri(sample)
    if uri is None:
        return None
    return tag("img", src=uri, alt=alt, class_="small" if "image/png" in uri[:20] else None)
