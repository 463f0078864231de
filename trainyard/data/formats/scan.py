"""The output of every format's reader: the rows of the index, file by file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainyard.data.formats.left_out import LeftOut, ending
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.source import is_remote

# In lower case; the image types of data sets that Pillow opens.
IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
)
ARRAY_SUFFIX = ".npy"
"""The suffix of an array, which is a multispectral image unless it accompanies another image."""
_THREADS, _REMOTE_THREADS = 8, 64  # every remote read waits for a server
# Folders of macOS, Synology, Windows and ext4.
_NOT_DATA = frozenset(
    ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")
)
MAX_CLASSES = 2**24  # more than any data set has; a label of this or above means damage


def num_threads(place: ResolvedLocation) -> int:
    """Number of files of a place that are scanned at once."""
    return _REMOTE_THREADS if is_remote(place.root) else _THREADS


def is_hidden(name: str) -> bool:
    """True for a file or folder that is not data: `.ipynb_checkpoints`, `._x.jpg`, `__MACOSX`."""
    return name.startswith(".") or name in _NOT_DATA


class FileRows(NamedTuple):
    """Samples of one file, in stored order; a large file gives several of these."""

    path: str  # relative to the root of the place
    offsets: Sequence[int]  # bytes
    sizes: Sequence[int]  # bytes
    labels: Sequence[int]  # of all samples, end to end
    split: str = ""  # the split of the samples, for a file of several
    # For images in Snappy data: where each begins in its span, and its length; see snappy.py.
    snappy_start: Sequence[int] = ()
    snappy_length: Sequence[int] = ()
    counts: Sequence[int] | None = None  # with lists of labels: the number of each sample's


class FileScan(NamedTuple):
    """The findings of a reader in one file, apart from all others."""

    rows: Iterable[FileRows]
    about: Any = None
    """What else the reader needs of the file, as JSON has it; complete after the rows."""
    left_out: LeftOut = LeftOut()
    """Complete after the rows."""


ReadFiles = Callable[[Sequence[str]], Iterator[FileScan]]
"""Reads files of a place, in the order of their names."""
Via = Callable[[ReadFiles, Sequence[str]], Iterator[FileScan]]
"""Calls a `ReadFiles` for some of the names, and yields what it or an earlier call has found."""


def directly(read: ReadFiles, names: Sequence[str]) -> Iterator[FileScan]:
    """Reads all files."""
    return read(names)


def in_threads(threads: int, read: Callable[[str], FileScan]) -> ReadFiles:
    """Reads many files at once, each by one call."""

    def read_files(names: Sequence[str]) -> Iterator[FileScan]:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(read, names)

    return read_files


def all_rows(scans: Iterable[FileScan], left_out: LeftOut) -> Iterator[FileRows]:
    """The rows of all files; adds to `left_out` what each leaves out."""
    for scan in scans:
        yield from scan.rows
        left_out.update(scan.left_out)


@dataclass(frozen=True)
class Scan:
    place: ResolvedLocation
    format: str
    classes: Sequence[str] | None
    """Names by label, complete once the rows are exhausted; None or empty without stored names.

    They may have any order: the index numbers classes by their sorted names.
    """
    watched: tuple[str, ...]
    """Files and folders, relative to the root, whose change makes the index stale."""
    rows: Iterator[FileRows]
    files: int = 0
    """Number of shards that the rows come from; 0 if files hold single images."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Files, rows and members that are no samples; complete once the rows are exhausted."""


def scan_of_files(
    place: ResolvedLocation,
    names: tuple[str, ...],
    rows: Iterator[FileRows],
    *,
    format: str,
    classes: Sequence[str] | None,
    left_out: LeftOut,
) -> Scan:
    """The scan of files with many samples each, any of which makes the index stale.

    Files of a glob or a brace list that are not among `names` are left out.
    """
    watched, read = place.watched(names), {*names}
    for name in () if place.is_folder else place.names:
        if name not in read:
            left_out.add(ending(name), name)
    return Scan(place, format, classes, watched, rows, files=len(names), left_out=left_out)
