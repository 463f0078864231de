"""The account of a scan: the files, rows and members that it leaves out, by kind."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "hidden"
BROKEN_LINK = "broken links"
LOOP = "links to a folder above"
NO_IMAGE = "folders without an image"
EMPTY = "empty files"
SPECIAL = "special files (pipes, sockets, devices)"
LOOSE = "images in no class folder"
COLUMNS = "columns that are not read"
BESIDE = "folders beside the shards"
NO_SPLIT = "files in no split"
RESERVED = "members with a reserved name"
FEATURES = "arrays in folders of other images"
MASKS = "masks beside images"
DOTTED = "samples with a dot in the name, since a key ends at the first one: rename them"

PLUGINS = {"HEIF": ("pillow-heif", (".heic", ".heif")), "DICOM": ("pydicom", (".dcm", ".dicom"))}
"""The package that reads each format which Pillow does not, and the endings, in lower case."""
_LONGEST = 8  # characters of an ending, the dot included
_MASK = re.compile(r"[_-](?:mask|seg|segmentation)(?:[_-]?\d+)?\.[^.]+$", re.IGNORECASE)


def needs_plugin(kind: str) -> str:
    """How to make a format of PLUGINS readable, as the end of a sentence."""
    return f"which `pip install {PLUGINS[kind][0]}` makes readable"


def is_like_mask(path: str) -> bool:
    """True for the name of a mask, if there is its image."""
    return _MASK.search(path) is not None


def masks_in(paths: Sequence[str]) -> dict[str, None]:
    """The masks of other images among images: `x_mask.png` and `x_mask_1.png` beside `x.png`."""
    likely = {path: path[: match.start()] for path in paths if (match := _MASK.search(path))}
    stems = {os.path.splitext(path)[0] for path in paths} if likely else set()
    return dict.fromkeys(path for path, stem in likely.items() if stem in stems)


def ending(name: str) -> str:
    """The kind of a file whose ending no reader knows: "files ending in .txt"."""
    suffix = os.path.splitext(name)[1].lower()
    for kind, (_, suffixes) in PLUGINS.items():
        if suffix in suffixes:
            return f"files ending in {suffix}, {needs_plugin(kind)}"
    if not suffix:
        return "files without an ending"
    # Numbers and hashes after a dot are no endings: each would be a kind of its own.
    is_kind = suffix[1:].isalnum() and not suffix[1:].isdigit() and len(suffix) <= _LONGEST
    return f"files ending in {suffix}" if is_kind else "files with other endings"


def kinds_of(kind: str) -> list[str]:
    """The kinds of files of a format of PLUGINS that is not read."""
    return [ending(f"x{suffix}") for suffix in PLUGINS[kind][1]]


class LeftOut:
    """The account of a scan: the number of each kind, and the first name as an example.

    `found = read + left out`: each file, row or member that a scan meets is a sample, a part of one
    (its label, say), or counted here. A folder that is not entered counts as one.
    """

    def __init__(self, kinds: Mapping[str, Sequence[Any]] = {}) -> None:
        self.kinds: dict[str, tuple[int, str]] = {
            kind: (int(count), str(example)) for kind, (count, example) in kinds.items()
        }
        """Number and example of each kind, as JSON has it too."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeftOut) and self.kinds == other.kinds

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def __str__(self) -> str:
        """The kinds in one phrase: `3 hidden (a/.x.jpg), 12 files ending in .heic (a/b.heic)`."""
        return ", ".join(f"{text} ({name})" for text, name in self.lines())

    def lines(self) -> Iterator[tuple[str, str]]:
        """Number and kind, "1 broken link" or "3 broken links", and example of each kind."""
        for kind, (count, name) in self.kinds.items():
            one = re.sub(r"s\b", "", kind, count=1).replace(" are ", " is ")
            yield f"{count:,} {one if count == 1 else kind}", name

    @property
    def total(self) -> int:
        """Number of files, rows and members of all kinds."""
        return sum(count for kind, (count, _) in self.kinds.items() if kind != COLUMNS)

    def add(self, kind: str, name: str, count: int = 1) -> None:
        """Counts what is left out; the name serves as the example if it is the kind's first."""
        known, example = self.kinds.get(kind, (0, name))
        self.kinds[kind] = (known + count, example)

    def update(self, other: "LeftOut") -> None:
        """Counts what another scan leaves out, or another file's."""
        for kind, (count, name) in other.kinds.items():
            self.add(kind, name, count)
