"""Label spaces: which class of one data set is which class of another, by their names.

Data that store bare numbers have the numbers as names: number 2 is the class called "2", wherever
that class is in the order. The one other convention is ImageNet's, whose numbers 0 to 999 are the
positions of its sorted WordNet ids.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from trainyard.errors import DataError
from trainyard.printable import print_line

_NAMED = 3  # classes that a message names


def plain_names(names: Iterable[str], where: str) -> list[str]:
    """Names of classes stripped and in Unicode's form NFC, in which they are compared.

    DataError if two of them are one then.
    """
    first: dict[str, str] = {}
    for name in names:
        plain = unicodedata.normalize("NFC", name).strip() or name
        if plain in first:
            raise DataError(
                "data.classes-look-alike", location=where, first=first[plain], name=name
            )
        first[plain] = name
    return list(first)


class Match(NamedTuple):
    """Classes of one data set among those of another."""

    numbers: list[int]
    """The number of each."""
    remark: str
    """How numbers were matched; "" for names, and for numbers among numbers."""


def match_classes(
    known: Sequence[str], found: Sequence[str], where: str, *, has_names: bool
) -> Match:
    """The number among the `known` classes of each class found at `where`.

    Classes are matched by name; `found` may be a part of `known`. `has_names` is False for bare
    numbers. DataError for a class that is not known.
    """
    number_of = {name: number for number, name in enumerate(known)}
    if number_of.keys() >= set(found):
        last = found[-1]
        text = f"{where}: names no classes: label {last} is taken for the class called {last!r}"
        is_plain = list(known) == [str(number) for number in range(len(known))]
        remark = "" if has_names or is_plain else text
        return Match([number_of[name] for name in found], remark)
    wnids = _imagenet_wnids()
    names = dict(zip(wnids, map(str, range(len(wnids))), strict=True))
    if names.keys() == set(known):
        names = {number: wnid for wnid, number in names.items()}
    if names.keys() == set(found) and {*names.values()} == set(known):
        remark = f"{where}: classes 0 to 999 are ImageNet's, in the order of their WordNet ids"
        return Match([number_of[names[name]] for name in found], remark)
    raise DataError(
        "data.unknown-classes",
        location=where,
        num_classes=len(found),
        num_known=len(known),
        differences=_how_they_differ(known, found),
        hint=_way_out(known, found, has_names),
    )


def unite_classes(parts: Iterable[tuple[Sequence[str], bool]]) -> list[str]:
    """The sorted names of all classes of data sets, each given by its classes and `has_names`.

    Bare numbers are no names where another data set has names.
    """
    parts = list(parts)
    named = {name for classes, has_names in parts if has_names for name in classes}
    return sorted(named) or sorted({name for classes, _ in parts for name in classes}, key=int)


def report(match: Match) -> list[int]:
    """The numbers of a match, whose remark is printed."""
    if match.remark:
        print_line(match.remark)
    return match.numbers


@cache
def _imagenet_wnids() -> tuple[str, ...]:
    return tuple(sorted((files("trainyard.data.formats") / "ilsvrc2012.txt").read_text().split()))


def _how_they_differ(known: Sequence[str], found: Sequence[str]) -> str:
    new, missing = sorted(set(found) - set(known)), sorted(set(known) - set(found))
    texts = [f"{name!r} is new" for name in new[:_NAMED]]
    return ", ".join(texts + [f"{name!r} is missing" for name in missing[:_NAMED]])


def _way_out(known: Sequence[str], found: Sequence[str], has_names: bool) -> str:
    names = "a dataset.json beside {} can name them (`trainyard data pack` writes one)"
    if not has_names:
        return f"; it numbers its classes without naming them: {names.format('it')}"
    if list(known) == [str(number) for number in range(len(known))]:
        return (
            "; if the training data numbers its classes without naming them, "
            f"{names.format('the training data')}"
        )
    if len(found) == 1:
        return (
            f"; all its images are of class {found[0]!r}: they need a folder for each class, or a "
            "list (.csv) that names their classes"
        )
    return ""
