"""Checks that train and val share no files or images, by names and checksums."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainyard.data.formats.packed import read_table
from trainyard.data.index.overlap import same_places
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.open import open_source
from trainyard.datasets.verify.checks import Check, Finding, checked
from trainyard.datasets.verify.shards import Files
from trainyard.errors import DataError

Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class Part:
    """A split: its files and its index."""

    name: str
    files: Files
    index: Index


def check_overlap(parts: Sequence[Part]) -> Iterator[Check]:
    """Checks the first split against each other one: equal positions in files, equal checksums.

    Checksums are SHA-256 sums of shards or of images that `dataset.json` lists, and the CRC-32C of
    each image in packed shards; images of equal CRC are compared byte by byte. An overlap is a
    problem, since validation images that are trained on falsify the accuracy.
    """
    for other in parts[1:]:
        first, both = parts[0], f"{parts[0].name}, {other.name}"
        rows = same_places(first.index, other.index)
        found = (_finding(other, row, f"is in {first.name} too") for row in rows.tolist())
        yield checked(both, "overlap", "by file names", found, count=len(rows))
        same: list[Finding] = []
        compared = []
        ours, theirs = _sums(first.files), _sums(other.files)
        if ours and theirs:
            compared.append("SHA-256")
            same += _same_sums(ours, theirs, first.name)
        if first.index.format == other.index.format == "packed":
            compared.append("CRC-32C of images")
            same += _same_records(first, other, set(rows.tolist()))
        if compared:
            yield checked(both, "overlap by checksum", " and ".join(compared), same)


def _finding(part: Part, row: int, what: str) -> Finding:
    file, offset, _ = part.index.locate(row)
    return Finding(what, file, offset, row)


def _sums(files: Files) -> dict[str, str]:
    """The paths in dataset.json by SHA-256."""
    if not files.of_images:
        return {shard.sha256: path for path, shard in files.listed.items()}
    above = os.path.dirname(files.place.root.rstrip(os.sep))
    found: dict[str, str] = {}
    for path in files.listed:
        if path not in files.missing:
            with closing(open_source(path)) as source:
                text = os.fsdecode(source.read(0, source.size))
            rows = (line.split("  ", 1) for line in text.split("\n") if "  " in line)
            found |= {digest: os.path.join(above, name) for digest, name in rows}
    return found


def _same_sums(ours: dict[str, str], theirs: dict[str, str], first: str) -> Iterator[Finding]:
    for digest in sorted(theirs.keys() & ours.keys(), key=theirs.__getitem__):
        if ours[digest] != theirs[digest]:
            yield Finding(f"has the SHA-256 of {ours[digest]} in {first}", theirs[digest])


def _same_records(first: Part, other: Part, known: set[int]) -> Iterator[Finding]:
    """Images with the size and CRC of one in the other split, and equal bytes."""
    try:
        ours, theirs = _keys(first.index), _keys(other.index)
    except (DataError, OSError):  # other checks report the shard
        return
    readers = Reader(first.index), Reader(other.index)
    order = np.argsort(ours, kind="stable")
    ordered = ours[order]
    for row in np.flatnonzero(np.isin(theirs, ours)).tolist():
        start, end = (np.searchsorted(ordered, theirs[row], side) for side in ("left", "right"))
        same = (n for n in order[start:end].tolist() if readers[0].read(n) == readers[1].read(row))
        twin = next(same, None)
        if twin is not None and row not in known:
            file, offset, _ = first.index.locate(twin)
            yield _finding(other, row, f"has the bytes of {file}, byte {offset}, in {first.name}")


def _keys(index: Index) -> Keys:
    """A uint64 of the CRC-32C and the size of each image."""
    tables = []
    for row in range(len(index.file_names)):
        with closing(open_source(os.path.join(index.root, index.file_names[row]))) as source:
            tables.append(read_table(source))
    crc = np.concatenate([table.crc for table in tables]).astype(np.uint64)
    return crc << np.uint64(32) | index.size.astype(np.uint64) & np.uint64(0xFFFFFFFF)
