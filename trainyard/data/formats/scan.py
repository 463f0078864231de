"""The output of every format's reader: the rows of the index, file by file."""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainyard.data.formats.left_out import BESIDE, HIDDEN, PLUGINS, LeftOut, ending
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.source import is_remote

# Pillow's formats with a magic number that run no other program, as EPS and PDF do.
IMAGE_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2", ".j2k"),
}
"""The endings of each format that is read, in lower case; the names are Pillow's."""
for _kind, (_package, _suffixes) in PLUGINS.items():
    if find_spec(_package.replace("-", "_")):
        IMAGE_FORMATS[_kind] = _suffixes
IMAGE_SUFFIXES = frozenset(chain(*IMAGE_FORMATS.values()))
ARRAY_SUFFIX = ".npy"
"""The suffix of an array, which is a multispectral image unless it accompanies another image."""
T = TypeVar("T")

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


def is_metadata(name: str) -> bool:
    """True for files that Trainyard writes beside data: they are no part of it."""
    ours = (".trainyard-", "..trainyard-")  # the latter while they are written
    return name == "dataset.json" or name.startswith(ours) or name.endswith(".idx")


def several(hashes: "array[int]") -> set[int]:
    """The numbers that occur more than once."""
    values, counts = np.unique(hashes, return_counts=True)
    return {*values[counts > 1].tolist()}


def as_array(kind: str, values: NDArray[Any]) -> "array[int]":
    """Numbers as an array of Python's, which an index copies at once."""
    return array(kind, values.astype(kind).tobytes())


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
    time: int | None = None  # ns of the file's last change, of one that has just been looked at


class FileScan(NamedTuple):
    """The findings of a reader in one file, apart from all others."""

    rows: Iterable[FileRows]
    left_out: LeftOut
    """Complete after the rows."""


@contextmanager
def reading_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool for a generator. Its end does not wait for threads.

    A join deadlocks where the garbage collector ends the generator in the start of a thread.
    """
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def in_threads(threads: int, read: Callable[[str], T], names: Sequence[str]) -> Iterator[T]:
    """What `read` finds in each file, in the order of the names; several are read at once."""
    with reading_pool(threads) as pool:
        yield from pool.map(read, names)


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
    beside: dict[int, str] = field(default_factory=dict)
    """Names beside labels that are numbers, "" for one of several; complete as `classes` are."""
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

    What lies beside them is left out: in their folder, or among the files of a glob or a list.
    """
    watched, read = place.watched(names), {*names}
    if place.is_folder:
        _add_others(left_out, place.root, read)
    for name in () if place.is_folder else place.names:
        if name not in read:
            left_out.add(ending(name), name)
    return Scan(place, format, classes, watched, rows, files=len(names), left_out=left_out)


def _add_others(left_out: LeftOut, folder: str, names: set[str]) -> None:
    """Counts what a folder holds besides the files of these names."""
    with os.scandir(folder) as entries:
        others = [entry for entry in entries if entry.name not in names]
    for entry in sorted(others, key=lambda entry: entry.name):
        if is_hidden(entry.name) and not is_metadata(entry.name):
            left_out.add(HIDDEN, entry.name)
        elif not is_metadata(entry.name):
            is_folder = os.path.isdir(entry.path)
            left_out.add(BESIDE if is_folder else ending(entry.name), entry.name)


class EncodedSample(NamedTuple):
    """The content of an image file, to be written into a shard."""

    image: bytes
    suffix: str  # by the file type of the bytes: ".jpg", ".png", …
    label: int
    key: str  # unique in the data set, without dots or slashes
    labels: list[int] | None = None  # any number of classes instead of `label`
