"""What a format says of itself: all that the other parts know of it.

A module of this folder, or of another package, has one as `FORMAT`; `formats/__init__.py` lists
them. A package's own is an entry point of the group `trainyard.formats`: see docs/own-code.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.data.formats.scan import EncodedSample, Scan
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.source import Source

Write = Callable[[Path, Iterable[EncodedSample], Sequence[str] | None], None]
"""Writes a shard: its path, the samples, and the names of the classes, None without any."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How `data pack` writes a format."""

    write: Write | None
    """None for a file for each image: the only such format is the folder."""
    name: Callable[[str, str, int], tuple[str, int, str]]
    """Given the name of the data set, the split and the number of shards: the text before a shard's
    number, the number's digits, and the text after it."""
    overhead: int = 0
    """Bytes of a sample besides its image."""
    holds_lists: bool = False
    """True if a sample can have several labels."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of data sets."""

    name: str
    recognises: Callable[[ResolvedLocation], bool]
    """True if the files of a location are of this format, by their contents."""
    scan: Callable[[ResolvedLocation], Scan]
    """Finds the samples: files, offsets, sizes and labels. DataError for damage."""
    patterns: tuple[str, ...] = ()
    """Names of its shards, as globs: in a folder, these may be of several splits."""
    kind: str = ""
    """Files of one kind cannot be read as those of another; by default, the name."""
    options: tuple[str, ...] = ()
    """Options of a location: `FILE#label=COLUMN`."""
    splits_inside: Callable[[ResolvedLocation], tuple[str, ...]] = lambda location: ()
    """The splits in one file, or none."""
    cells: Callable[[ResolvedLocation, str], Mapping[str, str] | None] | None = None
    """The cell of a column for each path, of a format that is a table; None without the column."""
    check_shard: Callable[[Source], None] | None = None
    """Checks what `scan` does not look at, such as checksums. DataError for damage."""
    shards: Shards | None = None
    """None if it cannot be written."""
