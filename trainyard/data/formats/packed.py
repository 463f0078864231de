"""Packed shards: samples at multiples of 64 bytes, for memory mapping, and a table of them.

    header    64 bytes: magic, version, zeros
    samples   packed_record.py's records, or unchanged image files; zeros to the next multiple
    table     offset and size (int64[n] each), label (int32[n]), CRC-32C of the sample (uint32[n])
    names     of the classes by label, a JSON list, or null
    footer    64 bytes: magic, version, offset of the table, its checksum and the footer's own

Numbers are little-endian. A scan reads only the end of the file: footer, names and table.
"""

import json
import struct
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from trainyard.data.arrays import Int32s, Ints
from trainyard.data.formats.format import Format, Shards
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.scan import (
    MAX_CLASSES,
    EncodedSample,
    FileRows,
    Scan,
    as_array,
    in_threads,
    num_threads,
    scan_of_files,
)
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source, checksum
from trainyard.errors import DataError

SUFFIX = ".packed"
_ALIGN = 64  # bytes
_MAGIC, _VERSION = b"\xa7TYshard", 1
_END_MAGIC = b"drahsYT\xa7"
_HEADER = struct.Struct("<8sI52x")
# Version; samples, bytes of the names; offset of the table; CRC-32C of table and names.
_FOOTER = struct.Struct("<8sIIQQQ20xI")  # and CRC-32C of the footer so far
_ROW = 24  # bytes in the table
_READ_AHEAD = 1 << 16  # last bytes of the file, read at once: the whole table of 2,500 samples


class Table(NamedTuple):
    """The columns of a shard's table, and the names of classes."""

    offset: Ints
    size: Ints
    label: Int32s
    crc: NDArray[np.uint32]
    classes: list[str] | None


def recognises(place: ResolvedLocation) -> bool:
    """True if the files of a location are packed shards by name."""
    return bool(place.files(SUFFIX))  # `scan` reports a file with this suffix in another format


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a location, shard by shard; DataError for a damaged table."""
    names = place.files(SUFFIX)
    with open_source(place.path(names[0])) as source:
        classes = read_table(source).classes
    rows = in_threads(num_threads(place), partial(_read_shard, place, names[0], classes), names)
    return scan_of_files(place, names, rows, format="packed", classes=classes, left_out=LeftOut())


def check_shard(source: Source) -> None:
    """Compares the checksum of every sample. DataError if one does not match its bytes."""
    table = read_table(source)
    for number, (offset, size, crc) in enumerate(
        zip(table.offset.tolist(), table.size.tolist(), table.crc.tolist(), strict=True)
    ):
        if checksum(source, offset, offset + size) != crc:
            raise DataError(
                "packed.wrong-checksum",
                "{path}: sample {number}, byte {offset}: its checksum does not match its bytes",
                path=source.name,
                number=number,
                offset=offset,
            )


def write(path: Path, samples: Iterable[EncodedSample], classes: Sequence[str] | None) -> None:
    """Writes one shard; equal samples give equal bytes."""
    offsets, sizes, labels, crcs = array("q"), array("q"), array("i"), array("I")
    with open(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION))
        at = _HEADER.size
        for sample in samples:
            offsets.append(at)
            sizes.append(len(sample.image))
            labels.append(sample.label)
            crcs.append(crc32c(sample.image))
            file.write(sample.image)
            file.write(bytes(-len(sample.image) % _ALIGN))
            at += len(sample.image) + -len(sample.image) % _ALIGN
        names = json.dumps(classes if classes is None else list(classes)).encode()
        columns = zip((offsets, sizes, labels, crcs), ("<i8", "<i8", "<i4", "<u4"), strict=True)
        table = b"".join(np.array(column, dtype).tobytes() for column, dtype in columns)
        file.write(table + names)
        fields = crc32c(table + names), len(labels), len(names), at
        footer = _FOOTER.pack(_END_MAGIC, _VERSION, *fields, 0)[:-4]
        file.write(footer + struct.pack("<I", crc32c(footer)))


# --- reading ---


def _read_shard(
    place: ResolvedLocation, first: str, classes: list[str] | None, name: str
) -> FileRows:
    with open_source(place.path(name)) as source:
        table = read_table(source)
    if table.classes != classes:
        raise DataError("data.files-differ-in-classes", path=source.name, first=first)
    offsets, sizes = as_array("q", table.offset), as_array("q", table.size)
    return FileRows(name, offsets, sizes, as_array("i", table.label))


def read_table(source: Source) -> Table:
    """The table of a shard. DataError if the file is no shard, cut short or damaged."""
    start = max(0, source.size - _READ_AHEAD)
    end = source.read(start, source.size - start)
    checksum, count, names, at = _read_footer(source, end)
    size = count * _ROW + names
    if at + size + _FOOTER.size != source.size:
        raise _damaged(source, "its footer does not fit its length")
    body = end[at - start : at - start + size] if at >= start else source.read(at, size)
    if crc32c(body) != checksum:
        raise _damaged(source, "the checksum of its table does not match")
    table = Table(
        np.frombuffer(body, "<i8", count),
        np.frombuffer(body, "<i8", count, 8 * count),
        np.frombuffer(body, "<i4", count, 16 * count),
        np.frombuffer(body, "<u4", count, 20 * count),
        _class_names(source, body[_ROW * count :]),
    )
    _check(source, table, at)
    return table


def _read_footer(source: Source, end: bytes) -> tuple[int, int, int, int]:
    """Checksum of the table, number of samples, bytes of the names, and offset of the table."""
    footer = end[-_FOOTER.size :]
    is_whole = len(footer) == _FOOTER.size and footer.startswith(_END_MAGIC)
    if not is_whole:
        if source.read(0, min(8, source.size)) == _MAGIC:
            raise _damaged(source, "it is cut short")
        raise DataError(
            "packed.not-packed",
            "{path}: not a packed shard; `trainyard data pack` writes them",
            path=source.name,
        )
    _, version, checksum, count, names, table, own = _FOOTER.unpack(footer)
    if version != _VERSION:
        raise DataError(
            "file.other-version",
            path=source.name,
            version=version,
            known=_VERSION,
            hint=", or pack again",
        )
    if crc32c(footer[:-4]) != own:
        raise _damaged(source, "the checksum of its footer does not match")
    return checksum, count, names, table


def _class_names(source: Source, text: bytes) -> list[str] | None:
    try:
        names = json.loads(text)
        if names is None or (all(type(n) is str for n in names) and len({*names}) == len(names)):
            return None if names is None else list(names)
    except (ValueError, TypeError, RecursionError):
        pass
    raise _damaged(source, "its class names are no list of different names")


def _check(source: Source, table: Table, end: int) -> None:
    """DataError unless all samples lie before the table and have labels of known classes."""
    limit = MAX_CLASSES if table.classes is None else len(table.classes)
    is_inside = (table.offset >= 0) & (table.offset <= end) & (table.size >= 0)
    is_inside &= table.size <= end - table.offset
    if not is_inside.all():
        raise _damaged(source, f"sample {np.argmin(is_inside)} lies outside of it")
    if ((table.label < 0) | (table.label >= limit)).any():
        raise _damaged(source, "it has a label that is not a class number")


def _damaged(source: Source, why: str) -> DataError:
    return DataError(
        "packed.damaged",
        "{path}: a damaged packed shard: {reason}; copy or pack it anew",
        path=source.name,
        reason=why,
    )


FORMAT = Format(
    name="packed",
    recognises=recognises,
    scan=scan,
    patterns=(f"*{SUFFIX}",),
    check_shard=check_shard,
    shards=Shards(write=write, name=lambda name, split, _: (f"{name}-{split}-", 6, SUFFIX)),
)
