"""Seek tables: the offsets of tiles of blocks in each JPEG of a data set, so that a crop is
decoded without the data before it. The images are not changed.

A table lies beside the index, under its name and ".seek": a header, the first entry of each sample
(int64, one more than there are samples), memory-mapped, and the entries (see
_native/jpeg/seek.h), which the decoder reads.
"""

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import core, is_built, own_decoder
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.data.sampler.plan import Ids
from trainyard.data.storage.ahead import map_ahead
from trainyard.data.storage.encoded import EncodedSpans
from trainyard.data.storage.source import LocalFile, is_remote
from trainyard.errors import DataError
from trainyard.files import sole_write
from trainyard.installation import NEEDS_EXTENSION
from trainyard.world import usable_cores

_HEADER = struct.Struct("<8s64sq48x")  # magic with version, fingerprint of the index, samples
_MAGIC = b"TYSEEK02"
_CHUNK = 64  # samples of one task
_AHEAD = 4  # tasks per thread
_REMOTE_READS = 32  # at once


class SeekTable(NamedTuple):
    """The seek tables of a data set."""

    path: Path
    file: LocalFile
    first: NDArray[np.int64]  # [rows + 1]
    row: NDArray[np.int64] | None
    """The row of each sample; None for its number."""

    def of(self, ids: Ids) -> EncodedSpans:
        """The entries of samples; none for a sample whose range is damaged. Without entries, or if
        they do not fit, a sample is decoded from its start."""
        rows = ids if self.row is None else self.row[ids]
        begins, ends = self.first[rows], self.first[rows + 1]
        is_there = (begins >= 0) & (begins <= ends) & (ends <= self.first[-1])
        offsets = _HEADER.size + self.first.nbytes + begins * is_there * core.SEEK_ENTRY
        lengths = (ends - begins) * is_there * core.SEEK_ENTRY
        return EncodedSpans([self.file], np.zeros(len(ids), np.int64), offsets, lengths)

    @property
    def num_bytes(self) -> int:
        return self.file.size


def seek_path(index: Index) -> Path:
    """The file of an index's seek table."""
    return Path(f"{index.scanned[0]}.seek")


def open_seek(index: Index) -> SeekTable | None:
    """The seek tables of an index; None if there are none for it."""
    path = seek_path(index)
    try:
        file = LocalFile(str(path))
        magic, fingerprint, rows = _HEADER.unpack(file.read(0, _HEADER.size))
        with open(file.fileno(), "rb", closefd=False) as opened:
            first = np.asarray(np.memmap(opened, "<i8", "r", _HEADER.size, (rows + 1,)))
    except (OSError, ValueError, OverflowError):  # absent, empty, cut short or of another kind
        return None
    fits = rows == len(index) if index.row is None else rows > index.row.max()
    if not fits or (magic, fingerprint) != (_MAGIC, index.scanned[1].encode()):
        return None
    # In Python, whose integers do not wrap around.
    entries = file.size - _HEADER.size - first.nbytes
    if not is_built() or int(first[-1]) * core.SEEK_ENTRY != entries:
        return None
    return SeekTable(path, file, first, index.row)


def seek_remark(index: Index) -> str | None:
    """A warning about a seek table that exists and cannot be used, or None."""
    path = seek_path(index)
    if not is_built() or not path.exists() or open_seek(index) is not None:
        return None
    return (
        f"{path}: this seek table is of another version or of other data, or cut short, and is not "
        "used; run `trainyard data index --seek` anew"
    )


def check_extension() -> None:
    """DataError if no seek tables can be made."""
    if not is_built():
        raise DataError("data.needs-c-extension", name="--seek", hint=NEEDS_EXTENSION)


def build_seek(index: Index, progress: Callable[[int], None]) -> SeekTable:
    """Reads every image once and saves the seek tables of the usual kinds of JPEG.

    Unreadable images have no entries. DataError if no table can be made or saved.
    """
    check_extension()
    path = seek_path(index)
    try:
        _write(index, path, progress)
    except OSError as error:
        raise DataError("file.unwritable", path=path, reason=error.strerror) from None
    table = open_seek(index)
    assert table is not None
    return table


def _write(index: Index, path: Path, progress: Callable[[int], None]) -> None:
    first = np.zeros(len(index) + 1, "<i8")
    with sole_write(path) as file:
        file.write(_HEADER.pack(_MAGIC, index.scanned[1].encode(), len(index)))
        file.seek(first.nbytes, os.SEEK_CUR)
        count = 0
        for some in _entries(index):
            for table in some:
                file.write(table)
                count += 1
                first[count] = first[count - 1] + len(table) // core.SEEK_ENTRY
            progress(count)
        file.seek(_HEADER.size)
        file.write(first.tobytes())


def _entries(index: Index) -> Iterator[list[bytes]]:
    """The entries of each sample in order, in chunks, made by threads."""
    reader = Reader(index)
    where_remote = is_remote(index.locate(0)[0])
    threads = _REMOTE_READS if where_remote else usable_cores()

    def make(start: int) -> list[bytes]:
        return [_table(reader, sample) for sample in range(start, min(start + _CHUNK, len(index)))]

    pool = ThreadPoolExecutor(threads)
    try:
        yield from map_ahead(pool, make, range(0, len(index), _CHUNK), most=_AHEAD * threads)
    finally:
        pool.shutdown(cancel_futures=True)


def _table(reader: Reader, sample: int) -> bytes:
    decoder = own_decoder()
    assert decoder is not None
    try:
        return decoder.seek_table(reader.read(sample)) or b""
    except OSError:  # `data verify` and training report it
        return b""
