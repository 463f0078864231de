"""A section on images that may have a wrong label, from suspects.csv of `evaluate --out`."""

import csv
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.errors import InputError
from trainyard.printable import from_csv
from trainyard.report.markup import Html, about, join, tag
from trainyard.report.pictures import Album, open_data, rendering_of
from trainyard.report.predictions import Section, line, tile
from trainyard.report.runs import Run

_SHOWN = 48


class _Suspect(NamedTuple):
    data: str
    sample: int
    origin: tuple[str, int]
    """Its file, and the offset in it."""
    label: str
    guess: str
    confidence: float
    loss: float


def suspects_section(path: Path, run: Run) -> Section:
    """The first images of the file, with pictures if their data is at hand.

    InputError if the file is no suspects.csv of `evaluate --out FOLDER`.
    """
    suspects, count = _read(path)
    album = _album(suspects, run) if suspects else Album()
    album.load(one.sample for one in suspects)
    text = (
        f"The model takes {count:,} images for another class, and gives their label a probability "
        f"below 50%. Shown are the {len(suspects)} with the highest loss. Look at each before you "
        "change it."
    )
    tiles = [
        tile(
            album,
            one.sample,
            f"{one.label}, perhaps {one.guess}",
            line("is ", one.label),
            line("perhaps ", one.guess, class_="wrong"),
            tag("p", f"{one.confidence:.0%} sure, loss {one.loss:.2f}", class_="detail"),
        )
        for one in suspects
    ]
    note: Html | None = tag("p", album.why_none, class_="note") if album.why_none else None
    content = join(about(text), note, tag("ul", *tiles, class_="tiles"))
    return "suspects", "Likely wrong labels", content


def _read(path: Path) -> tuple[list[_Suspect], int]:
    """The first suspects, and the number of all."""
    try:
        with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = ({key: from_csv(of) for key, of in row.items()} for row in csv.DictReader(file))
            suspects = [_suspect(row) for row in islice(rows, _SHOWN)]
            return suspects, len(suspects) + sum(1 for _ in rows)
    except (OSError, csv.Error, KeyError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"it has no {error}"
        raise InputError(
            "report.suspects-unreadable",
            "--suspects {path}: {reason}: name the suspects.csv that trainyard evaluate RUN --out "
            "FOLDER wrote",
            path=path,
            reason=reason,
        ) from None


def _suspect(row: dict[str, Any]) -> _Suspect:
    return _Suspect(
        data=row["data"],
        sample=int(row["sample"]),
        origin=(row["file"], int(row["offset"])),
        label=row["class"],
        guess=row["guess"],
        confidence=float(row["confidence"]),
        loss=float(row["loss"]),
    )


def _album(suspects: list[_Suspect], run: Run) -> Album:
    try:
        index = open_data(run, suspects[0].data)
    except (InputError, OSError) as error:
        return Album(why_none=f"The images are not at hand here ({error}).")
    for one in suspects:
        is_there = 0 <= one.sample < len(index)
        if not is_there or index.locate(one.sample)[:2] != one.origin:
            return Album(why_none="The data has changed since, so its images are not shown.")
    return Album(index, rendering=rendering_of(run))
