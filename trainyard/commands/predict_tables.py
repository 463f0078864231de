"""Predictions as tables, as JSON, and as a file with a line per image."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from trainyard.classifier import Classifier, Guess, Guesses
from trainyard.commands.printing import result_console, write_csv
from trainyard.data.index.unlabelled import Images

_IN_FULL = 3  # up to so many images are shown with all guesses
_ONE_BY_ONE = 500  # up to so many images get a line each; for more, classes are counted
_BAR = 20  # characters


class Predicted(NamedTuple):
    """The predictions for some images."""

    images: Images
    said: Guesses


def as_json(classifier: Classifier, answers: Sequence[Predicted]) -> str:
    """All predictions as one JSON document."""
    tree = {
        "checkpoint": str(classifier.checkpoint),
        "step": classifier.step,
        "weights": classifier.weights or "raw",
        "images": [_entry(classifier, *row) for row in _rows(answers)],
    }
    return json.dumps(tree)


def _entry(classifier: Classifier, answer: Predicted, number: int) -> dict[str, Any]:
    images, said = answer
    if images.names is not None:
        entry: dict[str, Any] = {"image": images.names[number]}
    else:
        path, offset, _ = images.index.locate(number)
        entry = {"image": path, "offset": offset}
    if number in said.bad:
        return entry | {"error": said.bad[number]}
    guesses = _guesses(classifier, answer, number)
    return entry | {"guesses": [{"class": g.name, "probability": g.probability} for g in guesses]}


def write_answers(path: Path, classifier: Classifier, answers: Sequence[Predicted]) -> None:
    """Write a line per image: its name, its classes with probabilities, or its error.

    InputError if the file cannot be written.
    """
    top = max(said.classes.shape[1] for _, said in answers)
    columns = [f"{what}_{place + 1}" for place in range(top) for what in ("class", "probability")]
    rows: list[list[str]] = [["image", "error", *columns]]
    for answer, number in _rows(answers):
        name = answer.images.name(number)
        if number in answer.said.bad:
            rows.append([name, answer.said.bad[number], *[""] * len(columns)])
            continue
        guesses = _guesses(classifier, answer, number)
        cells = [cell for g in guesses for cell in (g.name, f"{g.probability:.6f}")]
        rows.append([name, "", *cells])
    write_csv("--csv", path, rows)


def _rows(answers: Sequence[Predicted]) -> Iterator[tuple[Predicted, int]]:
    for answer in answers:
        for number in range(len(answer.images.index)):
            yield answer, number


def _guesses(classifier: Classifier, answer: Predicted, number: int) -> list[Guess]:
    said = answer.said
    return classifier.named(said.classes[number], said.probabilities[number])


# --- on a terminal ---


def print_answers(
    classifier: Classifier, answers: Sequence[Predicted], written: str | None
) -> None:
    """Print all guesses of a few images, the top one of more, or counts of classes for many.

    `written`: the file with a line per image, if there is one.
    """
    console = result_console()
    rows = [(answer, number) for answer, number in _rows(answers) if number not in answer.said.bad]
    if len(rows) <= _IN_FULL:
        for answer, number in rows:
            console.print(answer.images.name(number), style="bold", soft_wrap=True)
            console.print(_in_full(classifier, answer, number))
    elif len(rows) <= _ONE_BY_ONE:
        console.print(_one_by_one(classifier, rows))
    else:
        console.print(_counted(classifier, answers, len(rows)))
        if written is None:
            console.print("--csv FILE.csv and --json tell of each image", soft_wrap=True)
    if written is not None:
        console.print(f"each image is in {written}", soft_wrap=True)


def _in_full(classifier: Classifier, answer: Predicted, number: int) -> Table:
    table = Table("class", box=box.SIMPLE_HEAD)
    table.add_column("probability", justify="right")
    table.add_column()
    for guess in _guesses(classifier, answer, number):
        bar = "█" * round(_BAR * guess.probability)
        table.add_row(guess.name, f"{guess.probability:.1%}", bar)
    return table


def _one_by_one(classifier: Classifier, rows: Sequence[tuple[Predicted, int]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("probability", justify="right")
    table.add_column("else", overflow="fold")
    for answer, number in rows:
        first, *others = _guesses(classifier, answer, number)
        rest = ", ".join(f"{guess.name} {guess.probability:.1%}" for guess in others[:2])
        table.add_row(answer.images.name(number), first.name, f"{first.probability:.1%}", rest)
    return table


def _counted(classifier: Classifier, answers: Sequence[Predicted], images: int) -> Table:
    """The number of images of each class, of so many `images` in all."""
    counts = np.sum([answer.said.counts for answer in answers], axis=0)
    table = Table("class", box=box.SIMPLE_HEAD)
    for name in ("images", "share"):
        table.add_column(name, justify="right")
    for number in np.argsort(-counts, kind="stable"):
        if counts[number]:
            share = counts[number] / images
            table.add_row(classifier.classes[number], f"{counts[number]:,}", f"{share:.1%}")
    return table
