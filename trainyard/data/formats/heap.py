"""Finds the elements of a variable-length HDF5 dataset in the file, to read them without HDF5.

The dataset stores references: length (4 bytes), address of a global heap collection (8), number of
an object in it (4). A collection is "GCOL", a version and its size; then come its objects, each
with number (2), uses (2), 4 unused, size (8), and its data padded to 8 bytes. Addresses count from
the end of the user block. (HDF5 File Format Specification, sections III.E and IV.A.2.d)
"""

import struct
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.data.arrays import Ints
from trainyard.data.storage.source import Source
from trainyard.errors import DataError

_REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("number", "<u4")])

_OBJECT = struct.Struct("<HH4xQ")  # number, uses, size
_COLLECTION_HEAD = 16  # bytes
_READ = 1024  # bytes of a collection read at first; enough for large images
_BLOCK = 2048  # elements that one thread looks up at a time


def check_readable_by_offset(dataset: Any, path: str) -> None:
    """DataError unless the elements of an HDF5 dataset lie unchanged in its file."""
    import h5py

    element = h5py.check_vlen_dtype(dataset.dtype)
    if element is None or np.dtype(element).itemsize != 1 or dataset.ndim != 1:
        raise DataError(
            "hdf5.images-not-bytes",
            "{path}: {dataset} of shape {shape} is no row of variable-length bytes, each the "
            "content of an image file",
            path=path,
            dataset=dataset.name,
            shape=tuple(dataset.shape),
        )
    settings = dataset.id.get_create_plist()
    problem = None
    if settings.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
        problem = "keeps its data in other files or in its header"
    elif settings.get_external_count():
        problem = "keeps its data in other files"
    elif settings.get_nfilters():
        problem = f"has the filter {settings.get_filter(0)[3].decode(errors='replace')}"
    elif dataset.file.id.get_create_plist().get_sizes() != (8, 8):
        problem = "lies in a file whose addresses are not of 8 bytes"
    if problem:
        raise DataError("hdf5.needs-repack", path=path, dataset=dataset.name, reason=problem)


def find_elements(dataset: Any, rows: Ints, source: Source, pool: Executor) -> tuple[Ints, Ints]:
    """The offset and size in bytes of each row's element; an empty one has offset 0.

    DataError names the row and the problem.
    """
    first = int(rows.min())
    wanted = _references(dataset, source, first, int(rows.max()) + 1)[rows - first]
    base = dataset.file.userblock_size
    order = np.lexsort((wanted["number"], wanted["address"]))  # in file order
    order = order[wanted["length"][order] > 0]
    blocks = [order[start : start + _BLOCK] for start in range(0, len(order), _BLOCK)]
    offsets = np.zeros(len(wanted), np.int64)
    found = pool.map(lambda part: _locate_block(wanted[part], rows[part], source, base), blocks)
    for part, block in zip(blocks, found, strict=True):
        offsets[part] = block
    return offsets, wanted["length"].astype(np.int64)


def _references(dataset: Any, source: Source, start: int, stop: int) -> NDArray[Any]:
    """The stored references of some rows; zero for rows that were never written."""
    found = np.zeros(stop - start, _REFERENCE)
    if dataset.chunks is None:
        offset = dataset.id.get_offset()
        if offset is not None:
            size = _REFERENCE.itemsize
            content = source.read(offset + start * size, (stop - start) * size)
            found[:] = np.frombuffer(content, _REFERENCE)
        return found
    (length,) = dataset.chunks
    for first in range(start // length * length, stop, length):
        if dataset.id.get_chunk_info_by_coord((first,)).byte_offset is None:
            continue
        chunk = np.frombuffer(dataset.id.read_direct_chunk((first,))[1], _REFERENCE)
        low, high = max(first, start), min(first + length, stop)
        found[low - start : high - start] = chunk[low - first : high - first]
    return found


def _locate_block(wanted: NDArray[Any], rows: Ints, source: Source, base: int) -> list[int]:
    offsets: list[int] = []
    collection = None
    columns = (wanted[name].tolist() for name in ("length", "address", "number"))
    for row, length, address, number in zip(rows.tolist(), *columns, strict=True):
        try:
            if collection is None or collection.start != base + address:
                collection = _Collection(source, base + address)
            offset, size = collection.find(number)
            if size != length:
                raise ValueError(f"has {length:,} bytes, but {size:,} are stored")
        except ValueError as error:
            raise DataError(
                "hdf5.damaged-row",
                "{path}: row {row}: {reason}",
                path=source.name,
                row=row,
                reason=str(error),
            ) from None
        offsets.append(offset)
    return offsets


class _Collection:
    """A global heap collection, parsed once and only as far as needed."""

    def __init__(self, source: Source, start: int) -> None:
        self.start = start
        self._source = source
        if start + _COLLECTION_HEAD > source.size:
            raise ValueError(f"lies at byte {start:,}, past the end of the file")
        self._head = source.read(start, min(_READ, source.size - start))
        self._end = start + int.from_bytes(self._head[8:16], "little")
        if self._head[:5] != b"GCOL\x01":
            raise ValueError(f"byte {start:,} is no global heap collection")
        if self._end > source.size:
            raise ValueError(f"the file is truncated in the collection at byte {start:,}")
        self._next = start + _COLLECTION_HEAD
        self._found: dict[int, tuple[int, int]] = {}

    def find(self, number: int) -> tuple[int, int]:
        """Offset and size in bytes of an object."""
        while number not in self._found:
            self._step()
        return self._found[number]

    def _step(self) -> None:
        content = self._next + _OBJECT.size
        if content > self._end:
            raise ValueError(f"is not in the collection at byte {self.start:,}")
        at = self._next - self.start
        head = self._head[at : at + _OBJECT.size]
        if len(head) < _OBJECT.size:
            head = self._source.read(self._next, _OBJECT.size)
        number, _, size = _OBJECT.unpack(head)
        if number == 0:  # free space up to the end
            raise ValueError(f"is not in the collection at byte {self.start:,}")
        self._next = content + -(-size // 8) * 8
        if self._next > self._end:
            raise ValueError(f"an object reaches past its collection at byte {self.start:,}")
        self._found[number] = content, size
