"""What every format's reader gives: the rows of the index, file by file."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainyard.data.location import Place
from trainyard.data.source import is_remote

# Lower case; what Pillow opens among the image types that data sets are made of.
IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
)
_THREADS, _REMOTE_THREADS = 8, 64  # on a server every read waits for an answer
# Folders of macOS, Synology, Windows and ext4.
_NOT_DATA = frozenset(
    ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")
)
_SHOWN = 3  # names of each kind in a remark
MAX_LABEL = 2**24  # more classes than any data set has; a larger number is damage


def num_threads(place: Place) -> int:
    """How many files of a place are scanned at once."""
    return _REMOTE_THREADS if is_remote(place.root) else _THREADS


def is_hidden(name: str) -> bool:
    """True if a file or a folder is no data: `.ipynb_checkpoints`, `._x.jpg`, `__MACOSX`."""
    return name.startswith(".") or name in _NOT_DATA


def tell_left_out(location: str, kinds: dict[str, list[str]]) -> None:
    """Say on stderr, in one line, which names of each kind are left out, if any."""
    told = []
    for what, names in kinds.items():
        more = f", … {len(names):,} in all" if len(names) > _SHOWN else ""
        if names:
            told.append(f"{what} ({', '.join(sorted(names)[:_SHOWN])}{more})")
    if told:
        sys.stderr.write(f"trainyard: {location}: left out: {'; '.join(told)}\n")


class FileRows(NamedTuple):
    """Samples of one file, in stored order; a large file comes in several of these."""

    path: str  # relative to the root of the place
    offsets: Sequence[int]  # bytes
    sizes: Sequence[int]  # bytes
    labels: Sequence[int]
    split: str = ""  # which one, of a file that holds several


@dataclass(frozen=True)
class Scan:
    place: Place
    format: str
    classes: Sequence[str] | None
    """Names by label once the rows are exhausted; None or empty where only numbers are stored.

    In any order: the index numbers classes by their sorted names.
    """
    watched: tuple[str, ...]
    """Files and folders, relative to the root, whose change makes the index out of date."""
    rows: Iterator[FileRows]
