"""Label spaces: which class of one data set is which class of another, by their names.

Data that store bare numbers have the numbers as names: number 2 is the class called "2", wherever
that class is in the order. The one other convention is ImageNet's, whose numbers 0 to 999 are the
positions of its sorted WordNet ids.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from trainyard.errors import DataError
from trainyard.printable import print_line

_NAMED = 3  # classes that a message names
_SEPARATORS = (None, ",", ";", "/", "|", "+", "&", "_", "-")  # None: blanks
_OF_NUMBERS = (None, ",", ";", "|")  # others are in dates and codes
# Characters of no width that are not in the category Cf, by Unicode's Default_Ignorable_Code_Point.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\ufe00-\ufe0f\U000e0000-\U000e0fff]"
)


def plain_names(names: Iterable[str], where: str) -> list[str]:
    """Names of classes stripped and in Unicode's form NFC, in which they are compared.

    DataError if two of them look the same.
    """
    first: dict[str, str] = {}
    plain = []
    for name in names:
        plain.append(unicodedata.normalize("NFC", name).strip() or name)
        seen = _visible(name)
        if seen in first:
            raise DataError(
                "data.classes-look-alike",
                "{location}: the classes {first!a} and {name!a} differ only in blanks, in "
                "characters that are not seen or in Unicode's form: give both one name",
                location=where,
                first=first[seen],
                name=name,
            )
        first[seen] = name
    return plain


def _visible(name: str) -> str:
    """What is seen of a name: without characters of no width, and with single blanks."""
    shown = (c for c in name if unicodedata.category(c) != "Cf" and not _UNSEEN.match(c))
    return unicodedata.normalize("NFC", " ".join("".join(shown).split())) or name


def _look(name: str) -> str:
    """Equal for names that differ in case, in width or in another form of the same characters."""
    return unicodedata.normalize("NFKC", _visible(name)).casefold()


def name_remarks(classes: Sequence[str]) -> list[str]:
    """Remarks about classes that look alike, and about those that are made of others."""
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(_look(name), []).append(name)
    remarks = [
        f"the classes {' and '.join(map(ascii, names))} look alike: are they one?"
        for names in alike.values()
        if len(names) > 1
    ]
    known = {*classes}
    joints = {name: joint for name in classes if (joint := _joint(name, known))}
    if joints:
        remarks.append(
            f"{first_of([*joints])}: made of several classes: several labels for an image are a "
            "list of labels, such as dog|sofa in a column labels; "
            f"LIST#between={next(iter(joints.values()))!r} takes those of a list apart"
        )
    return remarks


def first_of(names: Sequence[str]) -> str:
    """The first few of some names."""
    return ", ".join([*map(repr, names[:_NAMED]), *(["…"] if len(names) > _NAMED else [])])


def _joint(name: str, classes: set[str]) -> str:
    """The separator between two or more classes, or numbers, that a name is made of; else ""."""
    for separator in _SEPARATORS:
        parts = [part.strip() for part in name.split(separator)]
        are_numbers = separator in _OF_NUMBERS and all(map(str.isdigit, parts))
        if len(parts) > 1 and (are_numbers or classes.issuperset(parts)):
            return separator or " "
    return ""


class Match(NamedTuple):
    """Classes of one data set among those of another."""

    numbers: list[int]
    """The number of each."""
    remark: str
    """How numbers were matched; "" for names, and for numbers among numbers."""


def match_classes(
    known: Sequence[str], given: Sequence[str], where: str, *, has_names: bool
) -> Match:
    """The number among the `known` classes of each class found at `where`.

    Classes are matched by name; `given` may be a part of `known`. `has_names` is False for bare
    numbers. DataError for a class that is not known.
    """
    number_of = {name: number for number, name in enumerate(known)}
    if number_of.keys() >= set(given):
        last = given[-1]
        text = f"{where}: names no classes: label {last} is taken for the class called {last!r}"
        is_plain = list(known) == [str(number) for number in range(len(known))]
        remark = "" if has_names or is_plain else text
        return Match([number_of[name] for name in given], remark)
    wnids = _imagenet_wnids()
    names = dict(zip(wnids, map(str, range(len(wnids))), strict=True))
    if names.keys() == set(known):
        names = {number: wnid for wnid, number in names.items()}
    if names.keys() == set(given) and {*names.values()} == set(known):
        remark = f"{where}: classes 0 to 999 are ImageNet's, in the order of their WordNet ids"
        return Match([number_of[names[name]] for name in given], remark)
    raise DataError(
        "data.unknown-classes",
        "{location}: its classes differ from those of the training data ({num_classes} instead of "
        "{num_known}): {differences}{hint}",
        location=where,
        num_classes=len(given),
        num_known=len(known),
        differences=_how_they_differ(known, given),
        hint=_way_out(known, given, has_names),
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


def _how_they_differ(known: Sequence[str], given: Sequence[str]) -> str:
    new, missing = sorted(set(given) - set(known)), sorted(set(known) - set(given))
    texts = [f"{name!r} is new" for name in new[:_NAMED]]
    return ", ".join(texts + [f"{name!r} is missing" for name in missing[:_NAMED]])


def _way_out(known: Sequence[str], given: Sequence[str], has_names: bool) -> str:
    looks = {_look(name): name for name in known}
    for name in sorted({*given} - {*known}):
        if (twin := looks.get(_look(name))) is not None:
            return f"; {name!a} looks like {twin!a}: give both one name"
    names = "a dataset.json beside {} can name them (`trainyard data pack` writes one)"
    if not has_names:
        return f"; it numbers its classes without naming them: {names.format('it')}"
    if list(known) == [str(number) for number in range(len(known))]:
        return (
            "; if the training data numbers its classes without naming them, "
            f"{names.format('the training data')}"
        )
    if len(given) == 1:
        return (
            f"; all its images are of class {given[0]!r}: they need a folder for each class, or a "
            "list (.csv) that names their classes"
        )
    return ""
