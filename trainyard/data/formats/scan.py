"""What every format's reader gives: the rows of the index, file by file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Lower case; what Pillow opens among the image types that data sets are made of.
IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
)


class FileRows(NamedTuple):
    """The samples of one file, in stored order."""

    path: str  # relative to the root of the location
    offsets: list[int]  # bytes
    sizes: list[int]  # bytes
    labels: list[int]


@dataclass(frozen=True)
class Scan:
    root: Path
    format: str
    classes: tuple[str, ...] | None
    """None where the container stores class numbers without names."""
    watched: tuple[str, ...]
    """Files and folders, relative to the root, whose change makes the index out of date."""
    num_files: int | None
    """How many `rows` there will be, where that is known beforehand."""
    rows: Iterator[FileRows]
