"""The index of a data set of any format: the file, offset, size and label of each sample.

Columns are memory-mapped from one file, so opening takes equally long for a thousand samples and
for fourteen million, and all ranks of a node share the pages.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.formats.left_out import LeftOut
from trainyard.data.index.label_lists import LabelLists
from trainyard.data.storage.snappy import unpacked
from trainyard.files import atomic_write

_MAGIC = b"TYINDEX3"
_ALIGN = 64  # bytes

Columns = dict[str, NDArray[Any]]


class Chunks(NamedTuple):
    """A column that is written piece by piece."""

    dtype: np.dtype[Any]
    rows: int
    pieces: Iterable[NDArray[Any]]


@dataclass(frozen=True)
class Index:
    """A data set as a table of one row per sample; sample ids are row numbers."""

    root: str
    """The folder, or URL of one, that the file names are relative to; "" if they are absolute."""
    format: str
    classes: tuple[str, ...]
    """Names by number; the numbers themselves where the data stores no names."""
    has_names: bool
    """True if the data stores names of classes."""
    path: Path
    """The file that holds this index."""
    stamps: dict[str, list[int | str] | None]
    """The stamp of each file and folder when it was indexed; see source.py."""
    fingerprint: str
    """SHA-256 of the table: equal on every machine for equal data, whatever the folder."""
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    label: NDArray[np.int32]
    """The number of each sample's class; with lists of labels, of its list."""
    file_names: "StringColumn"
    snappy_start: NDArray[np.int32] | None = None
    """Where each image begins in its Snappy data; None if no image is compressed."""
    snappy_length: NDArray[np.int32] | None = None
    """Bytes of each image, unpacked; 0 for one that is stored as it is."""
    list_ends: NDArray[np.int64] | None = None
    """See `lists`; None if each sample has one class."""
    list_values: NDArray[np.int32] | None = None
    left_out: LeftOut = field(default_factory=LeftOut)
    """Files, rows and members of the data that are no samples, of all splits of a file."""
    parts: tuple[int, ...] = ()
    """Number of samples of each merged data set, in their order; empty for a single one."""

    def __len__(self) -> int:
        return len(self.label)

    @property
    def lists(self) -> LabelLists | None:
        """The lists of labels, for samples with any number of classes; None for one class each."""
        if self.list_ends is None or self.list_values is None:
            return None
        return LabelLists(self.list_ends, self.list_values)

    def all_labels(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The samples and class numbers of all labels, in the order of the samples."""
        if self.lists is None:
            return np.arange(len(self)), self.label
        return self.lists.flat(self.label)

    def samples_per_class(self) -> NDArray[np.int64]:
        """Number of samples of each class: int64[classes]."""
        counts: NDArray[np.int64] = np.bincount(self.all_labels()[1], minlength=len(self.classes))
        return counts

    def of_class(self, label: int) -> NDArray[np.int64]:
        """The samples of a class, ascending."""
        rows, labels = self.all_labels()
        found: NDArray[np.int64] = rows[labels == label]
        return found

    def class_names(self, sample: int) -> list[str]:
        """The names of a sample's classes: one, or any number with lists of labels."""
        label = int(self.label[sample])
        return [self.classes[n] for n in ([label] if self.lists is None else self.lists.of(label))]

    def locate(self, sample: int) -> tuple[str, int, int]:
        """The file (a path or URL), offset and size in bytes of one sample."""
        name = self.file_names[int(self.file[sample])]
        return os.path.join(self.root, name), int(self.offset[sample]), int(self.size[sample])

    def unpacked(self, sample: int, stored: bytes) -> bytes:
        """The image in the bytes at its place. OSError if they are damaged."""
        if self.snappy_start is None or self.snappy_length is None:
            return stored
        try:
            return unpacked(stored, int(self.snappy_start[sample]), int(self.snappy_length[sample]))
        except ValueError as error:
            path, offset, _ = self.locate(sample)
            raise OSError(f"{path}, byte {offset}: {error}") from None

    def optional_columns(self) -> "Columns":
        """The columns of one row per sample that only some indices have."""
        if self.snappy_start is None or self.snappy_length is None:
            return {}
        return {"snappy_start": self.snappy_start, "snappy_length": self.snappy_length}

    def list_columns(self) -> "Columns":
        """The columns of lists of labels; empty if each sample has one class."""
        return {} if self.lists is None else list_columns(self.lists)


def list_columns(lists: LabelLists) -> Columns:
    """The columns of lists of labels, as an index stores them."""
    return {"list_ends": lists.ends, "list_values": lists.values}


@dataclass(frozen=True)
class StringColumn:
    """Strings stored end to end, so that a million file names need no million objects."""

    text: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        start = self.ends[row - 1] if row else 0
        return os.fsdecode(self.text[start : self.ends[row]].tobytes())


# --- the saved file: magic, header length, JSON header, then columns aligned to 64 bytes ---


def load_index(path: Path) -> Index | None:
    """The index in a file, memory-mapped; None if it is absent or not whole."""
    try:
        table = np.asarray(np.memmap(path, np.uint8, "r"))
        header, first = _read_header(table)
    except (OSError, ValueError, IndexError, RecursionError):  # absent, cut short, another file
        return None
    columns = {}
    for name, (dtype, start, stop) in header["columns"].items():
        if first + stop > len(table):
            return None
        columns[name] = table[first + start : first + stop].view(dtype)
    names = StringColumn(columns.pop("file_name_text"), columns.pop("file_name_ends"))
    return Index(
        root="" if header["root"] is None else header["root"] or str(path.parent),
        format=header["format"],
        classes=tuple(header["classes"]),
        has_names=header["has_names"],
        path=path,
        stamps=header["stamps"],
        fingerprint=header["fingerprint"],
        file_names=names,
        left_out=LeftOut(header["left_out"]),
        parts=tuple(header.get("parts", ())),
        **columns,
    )


def _read_header(table: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset in bytes at which the columns begin."""
    if table[:8].tobytes() != _MAGIC:
        raise ValueError("not an index")
    length = int(table[8:16].view("<i8")[0])
    header: dict[str, Any] = json.loads(table[16 : 16 + length].tobytes())
    return header, _aligned(16 + length)


def save_index(path: Path, header: dict[str, Any], columns: Columns) -> None:
    """Writes an index; the header has root, format, classes, has_names, stamps and left_out."""
    header = header | {"fingerprint": _fingerprint(header["classes"], columns)}
    write_index(path, header, {n: Chunks(c.dtype, len(c), [c]) for n, c in columns.items()})


def write_index(path: Path, header: dict[str, Any], columns: dict[str, Chunks]) -> None:
    """Like `save_index`, without holding a whole column; the header also has a fingerprint."""
    layout, end = {}, 0
    for name, column in columns.items():
        start = _aligned(end)
        end = start + column.dtype.itemsize * column.rows
        layout[name] = (column.dtype.str, start, end)
    text = json.dumps(header | {"columns": layout}).encode()
    with atomic_write(path, _aligned(16 + len(text)) + end) as file:
        file.write(_MAGIC + len(text).to_bytes(8, "little") + text)
        for name, column in columns.items():
            file.seek(_aligned(16 + len(text)) + layout[name][1])
            for piece in column.pieces:
                file.write(piece.tobytes())


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _fingerprint(classes: list[str], columns: Columns) -> str:
    digest = hashlib.sha256(json.dumps(classes).encode())
    for name in sorted(columns):
        digest.update(columns[name].tobytes())
    return digest.hexdigest()
