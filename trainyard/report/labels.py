"""Sections on a run's saved scores for images with lists of labels: classes and worst errors."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.report.markup import Child, Html, about, join, table, tag
from trainyard.report.pictures import Album
from trainyard.report.predictions import (
    ERRORS,
    WORST_CLASSES,
    Section,
    class_name,
    highest,
    picture,
    source,
)
from trainyard.report.runs import Run
from trainyard.training.label_scores import LabelAccuracy, LabelScores
from trainyard.training.recorded import Recorded

Chosen = NDArray[np.bool_]  # [classes]
COLUMNS = ("Class", "Images", "Average precision", "F1")


def label_sections(
    run: Run, recorded: Recorded, said: LabelScores, album: Album
) -> tuple[list[Section], list[list[Any]]]:
    """The sections, and the classes as data for page.js: name, images, average precision, F1.

    Both are empty if no image could be read.
    """
    if not said.read.any():
        return [], []
    rows = [row for row in said.per_class(recorded.labels) if row.samples]
    data = [
        [class_name(run, row.label), row.samples, *(round(of, 4) for of in _shares(row))]
        for row in rows
    ]
    errors = _errors(run, recorded, said, album)
    note = tag("p", album.why_none, class_="note") if album.why_none else None
    sections = [
        ("classes", "Classes", join(source(recorded), _classes(run, rows))),
        ("errors", "Worst errors", join(note, errors)),
    ]
    return sections, data


def _shares(row: LabelAccuracy) -> tuple[float, float]:
    return row.average_precision, row.f1


def _classes(run: Run, rows: list[LabelAccuracy]) -> Html:
    text = (
        f"{len(rows):,} classes. F1 is of the images that have the class and those that the model "
        "gives a probability above 50%."
    )
    body: list[list[Child]] = [
        [class_name(run, row.label), f"{row.samples:,}", *(f"{of:.1%}" for of in _shares(row))]
        for row in rows[:WORST_CLASSES]
    ]
    caption = f"The {len(body)} worst of {len(rows):,} classes; the full table needs JavaScript"
    worst = table([*COLUMNS], body, caption=caption, numbers=1)
    return join(about(text), tag("div", tag("noscript", worst), id="classes-table"))


def _errors(run: Run, recorded: Recorded, said: LabelScores, album: Album) -> Html:
    """The images with the highest loss among those with a wrong or a missing label."""
    losses = np.nan_to_num(said.losses(recorded.labels), nan=np.inf).astype(np.float32)
    wrong = np.flatnonzero(((said.logits.T > 0) != recorded.labels).any(axis=1) & said.read)
    if not len(wrong):
        return about("Every label of the validation images is found, and no other.")
    samples = highest(losses, wrong, ERRORS)
    album.load(samples)
    text = (
        f"{len(wrong):,} of {int(said.read.sum()):,} validation images have a wrong or a missing "
        f"label. Shown are the {len(samples)} with the highest loss."
    )
    tiles = (_tile(run, recorded.labels[n], said.logits[:, n] > 0, n, album=album) for n in samples)
    return join(about(text), tag("ul", *tiles, class_="tiles", id="errors-grid"))


def _tile(run: Run, own: Chosen, guessed: Chosen, sample: int, *, album: Album) -> Html:
    missed, wrong = own & ~guessed, guessed & ~own
    image = picture(album, sample, f"has {_names(run, own)}")
    where = f"#{sample} {album.file(sample)}".strip()
    return tag(
        "li",
        tag("div", image or tag("span", "no picture", class_="no-picture"), class_="picture"),
        _line("has ", _names(run, own)),
        _line("missed ", _names(run, missed)) if missed.any() else None,
        _line("wrongly ", _names(run, wrong), class_="wrong") if wrong.any() else None,
        tag("p", where, class_="detail file", title=where),
    )


def _line(what: str, names: str, class_: str | None = None) -> Html:
    return tag("p", tag("span", what, class_="detail"), tag("b", names, class_=class_))


def _names(run: Run, chosen: Chosen) -> str:
    return ", ".join(class_name(run, n) for n in np.flatnonzero(chosen).tolist()) or "none"
