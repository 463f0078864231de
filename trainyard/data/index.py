"""The index: one row per sample, of any format: which file, where in it, how long, which class.

Columns are memory-mapped from one file, so opening costs the same for a thousand samples and for
fourteen million, and all ranks of a node share the pages.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.data import formats
from trainyard.data.formats.scan import Scan
from trainyard.data.location import location_root
from trainyard.errors import DataError
from trainyard.files import atomic_write, cache_folder

_MAGIC = b"TYINDEX2"
_ALIGN = 64  # bytes

Progress = Callable[[int], None]
"""Called now and then with the number of samples found so far."""


@dataclass(frozen=True)
class Index:
    """A data set as a table. `len` is its number of samples; ids are row numbers."""

    root: Path
    format: str
    classes: tuple[str, ...]
    """Names by number; the numbers themselves where the data stores no names."""
    has_names: bool
    """Whether the data stores names."""
    path: Path
    """The file that holds this index."""
    fingerprint: str
    """SHA-256 of the table: equal on every machine for equal data, whatever the folder."""
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    label: NDArray[np.int32]
    file_names: "StringColumn"

    def __len__(self) -> int:
        return len(self.label)

    def locate(self, sample: int) -> tuple[Path, int, int]:
        """The file, offset and size in bytes of one sample."""
        name = self.file_names[int(self.file[sample])]
        return self.root / name, int(self.offset[sample]), int(self.size[sample])


@dataclass(frozen=True)
class StringColumn:
    """Strings end to end, so that a million file names need no million objects."""

    text: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        start = self.ends[row - 1] if row else 0
        return os.fsdecode(self.text[start : self.ends[row]].tobytes())


def open_index(location: str, progress: Progress = lambda _: None) -> Index:
    """The index of a location: the saved one if the data has not changed since, else a new one."""
    for path in _saved_paths(location):
        index = load_index(path)
        if index is not None and not _is_stale(index):
            return index
    return build_index(location, progress)


def build_index(location: str, progress: Progress = lambda _: None) -> Index:
    """Scan a location and save its index beside the data, or in the cache if that is read-only."""
    scan = formats.scan(location)
    # Before the rows: a change while scanning must make this index stale, not pass unseen.
    stamps = {name: _stamp(scan.root, name) for name in scan.watched}
    columns, classes = _columns(scan, progress)
    header = {
        "format": scan.format,
        "classes": classes,
        "has_names": scan.classes is not None,
        "fingerprint": _fingerprint(classes, columns),
        "stamps": stamps,
    }
    index = load_index(_save(location, header, columns))
    assert index is not None
    return index


def _columns(scan: Scan, progress: Progress) -> tuple[dict[str, NDArray[Any]], list[str]]:
    file, offset, size, label = array("i"), array("q"), array("q"), array("i")
    names, ends = bytearray(), array("q")
    for number, rows in enumerate(scan.rows):
        names += os.fsencode(rows.path)
        ends.append(len(names))
        file.extend([number] * len(rows.labels))
        offset.extend(rows.offsets)
        size.extend(rows.sizes)
        label.extend(rows.labels)
        progress(len(label))
    if not label:
        raise DataError(f"{scan.root}: no images found in it")
    columns = {
        "file": np.frombuffer(file, "<i4"),
        "offset": np.frombuffer(offset, "<i8"),
        "size": np.frombuffer(size, "<i8"),
        "label": np.frombuffer(label, "<i4"),
        "file_name_text": np.frombuffer(names, "u1"),
        "file_name_ends": np.frombuffer(ends, "<i8"),
    }
    return columns, list(scan.classes or map(str, range(max(label) + 1)))


def _fingerprint(classes: list[str], columns: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(json.dumps(classes).encode())
    for name in sorted(columns):
        digest.update(columns[name].tobytes())
    return digest.hexdigest()


def check_same_classes(
    known: Sequence[str], found: Sequence[str], where: str, *, has_names: bool = False
) -> None:
    """DataError unless the classes found at `where` are the `known` ones, number for number.

    Containers that store bare numbers may hold fewer of them, and need not know the names.
    """
    found_is_bare = not has_names and list(found) == [str(n) for n in range(len(found))]
    # Names for what was bare numbers are news, but numbers that are names must be the same ones.
    known_is_bare = list(known) == [str(n) for n in range(len(known))] and not {*known} & {*found}
    fits = (found_is_bare or known_is_bare) and len(found) <= len(known)
    if fits or tuple(known) == tuple(found):
        return
    extra = [f"{name!r} is new" for name in sorted(set(found) - set(known))[:3]]
    missing = [f"{name!r} is missing" for name in sorted(set(known) - set(found))[:3]]
    raise DataError(
        f"{where}: its classes differ from those of the training data ({len(found)} instead of "
        f"{len(known)}): {', '.join(extra + missing) or 'they are in another order'}"
    )


# --- has the data changed? ---


def _stamp(root: Path, name: str) -> list[int | str] | None:
    """What changes when a watched file or folder does; None if it is gone."""
    if name == ".":  # by its names: its time changes when the index is saved in it
        names = sorted(entry for entry in os.listdir(root) if not entry.startswith("."))
        return [hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()]
    try:
        stat = os.stat(root / name)
    except OSError:
        return None
    return [stat.st_mtime_ns, stat.st_size]


def _is_stale(index: Index) -> bool:
    header, _ = _read_header(np.memmap(index.path, np.uint8, "r"))
    return any(_stamp(index.root, name) != stamp for name, stamp in header["stamps"].items())


# --- the saved file: magic, header length, JSON header, then columns aligned to 64 bytes ---


def load_index(path: Path) -> Index | None:
    """The index in a file, memory-mapped; None if there is none or it is not whole."""
    try:
        table = np.asarray(np.memmap(path, np.uint8, "r"))
        header, first = _read_header(table)
    except (OSError, ValueError, IndexError):  # absent, empty, cut short, or another file
        return None
    columns = {}
    for name, (dtype, start, stop) in header["columns"].items():
        if first + stop > len(table):
            return None
        columns[name] = table[first + start : first + stop].view(dtype)
    names = StringColumn(columns.pop("file_name_text"), columns.pop("file_name_ends"))
    return Index(
        root=Path(header["root"] or path.parent),
        format=header["format"],
        classes=tuple(header["classes"]),
        has_names=header["has_names"],
        path=path,
        fingerprint=header["fingerprint"],
        file_names=names,
        **columns,
    )


def _read_header(table: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset in bytes at which the columns begin."""
    if table[:8].tobytes() != _MAGIC:
        raise ValueError("not an index")
    length = int(table[8:16].view("<i8")[0])
    header: dict[str, Any] = json.loads(table[16 : 16 + length].tobytes())
    return header, _aligned(16 + length)


def _saved_paths(location: str) -> list[Path]:
    """Where the index of a location may lie: beside the data, else in the cache."""
    root = location_root(location)
    pattern = os.path.relpath(location, root)
    name = "index" if pattern == "." else f"index-{_short_hash(pattern)}"
    cached = cache_folder() / f"index-{_short_hash(os.path.realpath(location))}"
    return [root / f".trainyard-{name}", cached]


def _save(location: str, header: dict[str, Any], columns: dict[str, NDArray[Any]]) -> Path:
    beside, cached = _saved_paths(location)
    try:
        _write(beside, header | {"root": ""}, columns)  # moves with the data
        return beside
    except OSError:  # read-only or full
        pass
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _write(cached, header | {"root": str(beside.parent.resolve())}, columns)
        return cached
    except OSError as error:
        raise DataError(
            f"{location}: its index can be written neither beside it nor to {cached} "
            f"({error.strerror}); set TRAINYARD_CACHE to a writable folder"
        ) from None


def _write(path: Path, header: dict[str, Any], columns: dict[str, NDArray[Any]]) -> None:
    layout, end = {}, 0
    for name, column in columns.items():
        start = _aligned(end)
        end = start + column.nbytes
        layout[name] = (column.dtype.str, start, end)
    text = json.dumps(header | {"columns": layout}).encode()
    with atomic_write(path) as file:
        file.write(_MAGIC + len(text).to_bytes(8, "little") + text)
        for name, column in columns.items():
            file.seek(_aligned(16 + len(text)) + layout[name][1])
            file.write(column.tobytes())


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
