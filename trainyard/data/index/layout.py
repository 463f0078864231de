"""Doubts about folders as classes: parts of an archive, masks and patients are folders too.

A folder per class is recognised by one fact, folders with images below. More facts speak against
it: what the folders are called, where the images lie, and a table that lists them.
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from trainyard.data import formats
from trainyard.data.formats.folder import (
    classes_by,
    entries_of,
    has_image_suffix,
    is_folder,
    why_left_out,
)
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.remedies import remedy_beside
from trainyard.data.formats.scan import is_hidden
from trainyard.data.formats.split_names import JOINED, is_split_word, split_named, words_of
from trainyard.data.index.label_space import first_of
from trainyard.data.index.splits import (
    above_all_images,
    find_splits,
    split_remarks,
    without_splits,
)
from trainyard.data.storage.location import find_place
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError

_NAMED = 3  # folders that a text names
_TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".lst")
_TABLE_BYTES = 1 << 20
# Words for parts of a data set and for what lies beside its images; no class is called so.
_ROLE_WORDS = """
annotation annotations archive batch chunk class classes data dataset depth dir directory disc disk
file files fold folder ground gt image images img imgs jpeg jpegs jpg label labels map maps mask
masks object part parts patient patients picture pictures piece png rgb segmentation segmentations
set shard split study tar trimap trimaps truth vol volume zip
"""
_ROLES = frozenset(_ROLE_WORDS.split())
# Classes with a number: no doubt about class1 and class2, or type_1 and type_2.
_CLASSES = {"category", "class", "grade", "label", "level", "species", "stage", "type"}
_WORDNET = re.compile(r"n\d+")
_SHORT = re.compile(r"[A-Za-z]|[0-9a-f]{2}")  # of an alphabet, or of a hash
_ALSO_CLASSES = ("train", "valid")  # a vehicle, and a check that passed


class Doubt(NamedTuple):
    """A reason to think that the folders in a location are no classes."""

    location: str
    names: str
    reasons: str
    is_strong: bool
    """True if training is refused, unless the location is named as the training data itself."""

    def __str__(self) -> str:
        names, reasons = self.names, self.reasons
        return f"{self.location}: its folders {names} are taken for classes, though {reasons}"


def doubt_about(location: str) -> Doubt | None:
    """A doubt about the classes of a folder of images; None for other data, and without one."""
    try:
        resolved = find_place(location)
        if is_remote(location) or not resolved.is_folder or formats.recognise(resolved) != "folder":
            return None
        by = classes_by(resolved)
    except DataError:  # told where the data is opened
        return None
    entries = [e for e in entries_of(resolved.root) if is_folder(e) and not is_hidden(e.name)]
    is_deep = not any(map(_holds_image, entries))
    reasons = [*_by_name([entry.name for entry in entries], is_deep)]
    if is_deep or reasons:  # a folder without any image is no class
        entries = [entry for entry in entries if next(_images(entry.path), None)]
        reasons = [*_by_name([entry.name for entry in entries], is_deep)]
    names = [entry.name for entry in entries]
    if by:
        is_deep, reasons = False, [*_like_split(names)]
    elif len(entries) < 2:
        return None
    if is_deep:
        deeper = f"('{location}#classes=path' makes classes of these, #classes=name of their names)"
        reasons.append((f"all images lie deeper, in folders inside of them {deeper}", False))
        if all(map(_SHORT.fullmatch, names)) and not all(map(str.isdigit, names)):
            reasons.append(("they have the names of an alphabet or of hashes", False))
    if not by and (table := _table(resolved.root, entries)):
        reasons.append((f"{table} lists their images", False))
    is_strong = (is_deep and len(reasons) > 1) or any(strong for _, strong in reasons)
    text = " and ".join(text for text, _ in reasons)
    return Doubt(location, first_of(names), text, is_strong) if reasons else None


def check_classes(location: str, rest: str) -> None:
    """DataError if the folders in a location of training data are hardly classes.

    `rest`: the options that name the validation data, for the way out.
    """
    doubt = doubt_about(location)
    if doubt and doubt.is_strong:
        place = find_place(location)
        raise DataError(
            "data.doubtful-classes",
            "{location}: its folders {names} are taken for classes, though {reasons}: if they are "
            "classes, give --data.train {location} {hint}; else name the folder of the classes, "
            "or a list (.csv) of the images with their labels{remedy}",
            location=location,
            names=doubt.names,
            reasons=doubt.reasons,
            hint=rest,
            remedy=remedy_beside(place.root, LeftOut()),
        )


def location_remarks(location: str) -> list[str]:
    """Remarks about the choice of splits in a location, and a doubt about its classes."""
    doubt = doubt_about(find_splits(location).get("train") or without_splits(location))
    return split_remarks(location) + ([str(doubt)] if doubt else [])


def doubtful_names(names: Sequence[str]) -> str:
    """What the names of classes have of parts of a data set; "" for others."""
    return " and ".join(reason for reason, _ in _by_name(names, is_deep=False))


def _by_name(names: Sequence[str], is_deep: bool) -> Iterator[tuple[str, bool]]:
    """The reasons in names of folders, each with whether it is enough alone."""
    words = [words_of(name) for name in names]
    shapes = {re.sub(r"\d+", "0", name) for name in names}
    is_numbered = len(shapes) == 1 and len(names) > 1 and all(words)
    if is_numbered and not _CLASSES.intersection(words[0]):
        is_code = len("".join(words[0])) == 1 and not is_deep  # c0 to c9
        if not (is_code or all(map(_WORDNET.fullmatch, names))):
            yield "their names differ in digits alone", not _ROLES.isdisjoint(words[0])
    elif not is_numbered and all(one and _ROLES.issuperset(one) for one in words):
        yield "they are named like parts of a data set", True
    yield from _like_split(names)


def _like_split(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The reason in the first name that a split may have."""
    for name in names:
        own = words_of(name)
        is_split = all(is_split_word(word) or word in JOINED for word in own)
        if own and is_split and any(map(split_named, own)):
            yield f"{name!r} is named like a split", name.lower() not in _ALSO_CLASSES
            return


def _holds_image(folder: "os.DirEntry[str]") -> bool:
    with os.scandir(folder) as entries:
        return any(why_left_out(entry) is None for entry in entries)


def _images(folder: str) -> Iterator[str]:
    """The names of the images in a folder at any depth."""
    for _, _, names in os.walk(folder):
        yield from (name for name in names if has_image_suffix(name) and not is_hidden(name))


def _table(root: str, folders: Sequence["os.DirEntry[str]"]) -> str | None:
    """A table that lists an image of each of some folders.

    It lies in a location, or beside a split or the folder of all images.
    """
    above, name = os.path.split(os.path.abspath(root))
    parents = [root, above] if split_named(name) or above_all_images(root) else [root]
    tables = [
        entry.path
        for parent in parents
        for entry in entries_of(parent)
        if entry.name.lower().endswith(_TABLES) and entry.is_file() and not is_hidden(entry.name)
    ]
    images = [next(_images(entry.path), "") for entry in islice(folders if tables else (), _NAMED)]
    for path in tables:
        with open(path, "rb") as file:
            text = file.read(_TABLE_BYTES).decode(errors="replace")
        if images and all(image and _is_listed(image, text) for image in images):
            return path
    return None


def _is_listed(image: str, text: str) -> bool:
    stem = os.path.splitext(image)[0]
    is_telling = len(stem) > 4 and not stem.isdigit()  # "0001" may be any number
    wanted = stem if is_telling else image
    return re.search(rf"(?<![\w-]){re.escape(wanted)}(?![\w-])", text) is not None
