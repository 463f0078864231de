"""Reads the stored bytes of samples by offset, from any thread."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import core, is_built
from trainyard.data.index.table import Index
from trainyard.data.reading.staged_copies import Copies
from trainyard.data.sampler.plan import Ids
from trainyard.data.storage.encoded import EncodedSpans, in_memory
from trainyard.data.storage.mapped import MappedFiles, Readahead
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import CUT_SHORT, READ_ONLY, Source, Stamp, is_remote

if TYPE_CHECKING:
    from trainyard.data.storage.remote.files import RemoteFiles
    from trainyard.data.storage.remote.prefetch import Prefetcher

_MAX_OPEN = 256  # shards held open; far below the usual limit of 1024 descriptors
_PIECE = 16 << 20  # bytes of encoded images that a thread holds at once, or one image

Unreadable = dict[int, str]
"""Reasons why samples cannot be read, by their positions among the requested ones."""


class Reader:
    """Reads samples of an index; a file of many samples stays open between reads."""

    def __init__(self, index: Index, copies: Copies | None = None) -> None:
        self._index = index
        self._copies = copies
        self._shared = len(index.file_names) < len(index)  # several samples to a file
        self._local = _OpenFiles(_MAX_OPEN)
        self._remote: RemoteFiles | None = None
        self._prefetcher: Prefetcher | None = None
        if not _is_local(index):
            self._remote, self._prefetcher = self._from_servers()
        self._is_plain = is_built() and copies is None and _is_local(index)
        self._mapped, self._hints = MappedFiles(), Readahead()
        self._memory = threading.local()

    def read(self, sample: int) -> bytes:
        """The encoded image. OSError if it cannot be read whole, DataError if no file can."""
        return self._index.unpacked(sample, self.read_stored(sample))

    def read_stored(self, sample: int) -> bytes:
        """The bytes at the sample's place: like `read`, but Snappy data is not unpacked."""
        content = self._from_copy(sample)
        if content is not None:
            return content
        name, offset, size = self._index.locate(sample)
        if not self._shared and not offset and not is_remote(name):
            return _whole(name)
        return self._part(name, offset, size)

    def stored(self, ids: Ids) -> tuple[EncodedSpans, Unreadable]:
        """The encoded images of some samples; unreadable ones are empty.

        The images may lie in memory that this thread's next call reuses. DataError if no file can
        be read. Local files need no work in Python per sample.
        """
        if not self._is_plain:
            return self._one_by_one(ids)
        if self._are_parts(ids):
            return self.unpacked(ids, *self._maps(ids))
        return self._whole_files(ids)

    def unpacked(
        self, ids: Ids, images: EncodedSpans, unreadable: Unreadable
    ) -> tuple[EncodedSpans, Unreadable]:
        """The images, with those in Snappy data unpacked into memory of their own."""
        index = self._index
        if index.snappy_length is None:
            return images, unreadable
        left = np.flatnonzero(index.snappy_length[ids])
        if is_built():
            images, left = self._natively_unpacked(ids, images, left)
        buffers, which, offsets, lengths, reread = images
        buffers, bad = list(buffers), dict(unreadable)
        which, offsets, lengths = which.copy(), offsets.copy(), lengths.copy()
        for position in left.tolist():
            content = b""
            try:
                if position not in bad:
                    # `reread` gives an unpacked image.
                    stored, sample = images.content(position), int(ids[position])
                    content = stored if reread else index.unpacked(sample, stored)
            except OSError as error:
                bad[position] = str(error)
            which[position], offsets[position], lengths[position] = len(buffers), 0, len(content)
            buffers.append(content)
        return EncodedSpans(buffers, which, offsets, lengths, reread), bad

    def _natively_unpacked(
        self, ids: Ids, images: EncodedSpans, places: NDArray[np.intp]
    ) -> tuple[EncodedSpans, NDArray[np.intp]]:
        """The images with those at `places` unpacked, and the places where that failed."""
        index, samples = self._index, ids[places]
        assert index.snappy_start is not None and index.snappy_length is not None
        starts = index.snappy_start[samples].astype(np.int64)
        sizes = index.snappy_length[samples].astype(np.int64)
        ends, status = np.cumsum(sizes - np.minimum(starts, 0)), np.zeros(len(places), np.uint8)
        memory = self._room(int(ends[-1]) if len(ends) else 0)
        buffers, which, offsets, lengths, reread = images
        spans = buffers, which[places], offsets[places], lengths[places]
        core.unpack_snappy(*spans, starts, ends, memory, status)
        which, offsets, lengths = which.copy(), offsets.copy(), lengths.copy()
        is_done = status == core.OK
        done = places[is_done]
        which[done], lengths[done] = len(buffers), sizes[is_done]
        offsets[done] = (ends - sizes)[is_done]
        return EncodedSpans([*buffers, memory], which, offsets, lengths, reread), places[~is_done]

    def reread(self, ids: Ids, position: int) -> bytes:
        """The encoded image of `ids[position]`."""
        return self.read(int(ids[position]))

    def expect(self, ids: Ids) -> "PlannedReads":
        """Announces samples: requests remote ones, and asks the system to read local ones ahead."""
        mapped = self._mapped_parts(ids)
        if mapped is not None:
            self._hints.give(mapped[0])
        elif self._prefetcher is not None:
            index, remote = self._index, ids[self._to_be_fetched(ids)]
            places = index.file[remote], index.offset[remote], index.size[remote]
            self._prefetcher.expect(remote, *places)
        return PlannedReads(self, ids, mapped)

    def expects_enough(self) -> bool:
        """True if announcing more samples gains nothing."""
        return self._prefetcher is None or self._prefetcher.is_full()

    def expected(self, ids: Ids) -> tuple[EncodedSpans, Unreadable]:
        """Like `stored`, for announced samples: remote ones have been requested."""
        if self._prefetcher is None:
            return self.stored(ids)
        fetched = self._prefetcher.take(ids)
        left = np.array([position for position, part in enumerate(fetched) if part is None], int)
        (contents, *_), unreadable = self._one_by_one(ids[left], self.read_stored)
        rest = iter(contents)
        buffers = [next(rest) if part is None else part.content for part in fetched]
        offsets = np.array([0 if part is None else part.offset for part in fetched], np.int64)
        lengths = self.sizes(ids)
        bad = {int(left[position]): why for position, why in unreadable.items()}
        lengths[list(bad)] = 0
        return self.unpacked(ids, EncodedSpans(buffers, np.arange(len(ids)), offsets, lengths), bad)

    def sizes(self, ids: Ids) -> NDArray[np.int64]:
        """Sizes of the encoded images in bytes."""
        sizes: NDArray[np.int64] = self._index.size[ids]
        return sizes

    def _to_be_fetched(self, ids: Ids) -> NDArray[np.bool_]:
        """Mask of the samples that lie on a server and not in a copy on this node."""
        files, which = np.unique(self._index.file[ids], return_inverse=True)
        lie_there = np.array([is_remote(self._path(file)) for file in files.tolist()], bool)[which]
        if self._copies is not None:
            for position in np.flatnonzero(lie_there).tolist():
                lie_there[position] = self._copies.find(int(ids[position])) is None
        return lie_there

    def _are_parts(self, ids: Ids) -> bool:
        """True if the samples are parts of files, False if they are whole files."""
        return self._shared or bool(self._index.offset[ids].any())

    def _one_by_one(
        self, ids: Ids, read: Callable[[int], bytes] | None = None
    ) -> tuple[EncodedSpans, Unreadable]:
        contents, unreadable = [], {}
        for position, sample in enumerate(ids.tolist()):
            try:
                contents.append((read or self.read)(sample))
            except OSError as error:
                contents.append(b"")
                unreadable[position] = str(error)
        return in_memory(contents), unreadable

    def _mapped_parts(self, ids: Ids) -> tuple[EncodedSpans, Unreadable] | None:
        """Spans of mapped files, if the samples are parts of local files or of complete copies."""
        if self._is_plain:
            return self._maps(ids) if self._are_parts(ids) else None
        if self._copies is None or not is_built() or not self._copies.hold(self._index.file[ids]):
            return None
        found = self._maps(ids)
        return None if found[1] else found  # a copy was deleted by hand: see `_from_copy`

    def _maps(self, ids: Ids) -> tuple[EncodedSpans, Unreadable]:
        """Spans of mapped files; libraries get bytes by a read, since access to a map may fail."""
        index = self._index
        files, which = np.unique(index.file[ids], return_inverse=True)
        offsets, lengths = index.offset[ids], index.size[ids]
        place_of = self._path if self._copies is None else self._copies.path_of
        maps, ends, errors = self._mapped.get(files.tolist(), place_of)
        unreadable = {}
        outside = np.flatnonzero(offsets + lengths > ends[which])
        if outside.size:
            offsets[outside] = lengths[outside] = 0
            for position in outside.tolist():
                file = int(files[which[position]])
                unreadable[position] = errors.get(file) or f"{self._path(file)} {CUT_SHORT}"
        which = which.astype(np.int64, copy=False)
        return EncodedSpans(maps, which, offsets, lengths, partial(self.reread, ids)), unreadable

    def _whole_files(self, ids: Ids) -> tuple[EncodedSpans, Unreadable]:
        """Files of one sample each, read in one call, end to end into this thread's memory.

        A file whose size has changed since it was indexed is read as it is now.
        """
        index, names = self._index, self._index.file_names
        files, lengths = index.file[ids], index.size[ids]
        name_ends = names.ends[files]
        name_begins = np.where(files > 0, names.ends[files - 1], 0)
        ends = np.cumsum(lengths)
        offsets, memory = ends - lengths, self._room(int(ends[-1]) if len(ids) else 0)
        errors, root = np.zeros(len(ids), np.int32), os.fsencode(index.root)
        core.read_files(root, names.text, name_begins, name_ends, offsets, lengths, memory, errors)
        which, others, unreadable = np.zeros(len(ids), np.int64), list[bytes](), dict[int, str]()
        for position in np.flatnonzero(errors).tolist():
            try:
                others.append(_whole(self._path(int(files[position]))))
            except OSError as error:
                others.append(b"")
                unreadable[position] = str(error)
            which[position], offsets[position], lengths[position] = len(others), 0, len(others[-1])
        return EncodedSpans([memory, *others], which, offsets, lengths), unreadable

    def _room(self, size: int) -> NDArray[np.uint8]:
        """This thread's buffer, of at least `size` bytes."""
        memory: NDArray[np.uint8] | None = getattr(self._memory, "kept", None)
        if memory is None or len(memory) < size:
            memory = self._memory.kept = np.empty(size + size // 4, np.uint8)
        return memory

    def _path(self, file: int) -> str:
        return os.path.join(self._index.root, self._index.file_names[file])

    def _from_copy(self, sample: int) -> bytes | None:
        """The encoded image from this node's copy; None if there is none yet."""
        copy = self._copies.find(sample) if self._copies else None
        if self._copies is None or copy is None:
            return None
        try:
            content = self._part(copy.path, copy.offset, copy.size)
        except OSError:  # deleted by hand, or a bad disk
            self._copies.forget(copy.number)
            return None
        # No image begins with zeros; a hole in the copy marks an image that could not be copied.
        return content if any(content[:16]) else None

    def _from_servers(self) -> "tuple[RemoteFiles, Prefetcher]":
        from trainyard.data.storage.remote.files import RemoteFiles  # loads aiohttp
        from trainyard.data.storage.remote.prefetch import Prefetcher

        return RemoteFiles(self._stamp_of), Prefetcher(self._fetch)

    async def _fetch(self, file: int, offset: int, size: int) -> bytes:
        assert self._remote is not None
        return await self._remote.fetch(self._path(file), offset, size)

    def _part(self, name: str, offset: int, size: int) -> bytes:
        if self._remote is not None and is_remote(name):
            return self._remote.read(name, offset, size)
        file = self._local.acquire(name)
        try:
            return file.source().read(offset, size)
        finally:
            self._local.release(file)

    def _stamp_of(self, name: str) -> Stamp | None:
        """The file's stamp when it was indexed; None if the index has none."""
        return self._index.stamps.get(name.removeprefix(os.path.join(self._index.root, "")))


@dataclass(frozen=True)
class PlannedReads:
    """Announced samples, to be read a slice at a time, from any thread."""

    reader: Reader
    ids: Ids
    mapped: tuple[EncodedSpans, Unreadable] | None

    def pieces(self, part: slice) -> list[slice]:
        """Splits a slice into pieces whose encoded images fit into memory together."""
        if self.mapped is not None:
            return [part]
        piece = np.cumsum(self.reader.sizes(self.ids[part])) // _PIECE
        borders = part.start + np.flatnonzero(np.diff(piece)) + 1
        return [slice(a, b) for a, b in pairwise([part.start, *borders.tolist(), part.stop])]

    def stored(self, part: slice) -> tuple[EncodedSpans, Unreadable]:
        """Like `Reader.stored`, for a slice of the samples."""
        ids = self.ids[part]
        if self.mapped is None:
            return self.reader.expected(ids)
        (maps, which, offsets, lengths, _), unreadable = self.mapped
        reread = partial(self.reader.reread, ids)
        stored = EncodedSpans(maps, which[part], offsets[part], lengths[part], reread)
        inside = range(part.start, part.stop)
        bad = {n - part.start: why for n, why in unreadable.items() if n in inside}
        return self.reader.unpacked(ids, stored, bad)


class _OpenFiles:
    """Files kept open between reads; the least recently used are closed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def acquire(self, name: str) -> "_OpenFile":
        with self._lock:
            file = self._open.pop(name, None) or _OpenFile(name)
            file.users += 1
            self._open[name] = file
            if len(self._open) > self._most:
                oldest = next(iter(self._open.values()))
                oldest.evicted = True
                del self._open[oldest.name]
                oldest.close_if_unused()
            return file

    def release(self, file: "_OpenFile") -> None:
        with self._lock:
            file.users -= 1
            file.close_if_unused()


class _OpenFile:
    def __init__(self, name: str) -> None:
        self.name = name
        self.users = 0
        self.evicted = False
        self._source: Source | None = None
        self._opening = threading.Lock()

    def source(self) -> Source:
        """The file, opened at first use: a slow server delays only users of the same file."""
        with self._opening:
            if self._source is None:
                self._source = open_source(self.name)
            return self._source

    def close_if_unused(self) -> None:
        if self.evicted and not self.users and self._source is not None:
            self._source.close()


def _whole(name: str) -> bytes:
    fd = os.open(name, READ_ONLY)  # half the time of Python's own open
    try:
        return os.read(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _is_local(index: Index) -> bool:
    """True if all files are local; a part of a merged index has a single root."""
    parts = index.parts or (len(index),)
    firsts = np.cumsum((0, *parts[:-1])).tolist()
    return not any(is_remote(index.locate(first)[0]) for first in firsts)
