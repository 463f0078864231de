"""Reads the stored bytes of samples by offset, from any thread."""

import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import core, is_built
from trainyard.data.index.table import Index
from trainyard.data.reading.staging import StagedShards
from trainyard.data.sampler.plan import Ids
from trainyard.data.storage.encoded import EncodedSpans, ImageFile, in_memory
from trainyard.data.storage.source import READ_ONLY, LocalFile, Stamp, is_remote

if TYPE_CHECKING:
    from trainyard.data.storage.remote.prefetch import Prefetcher, RemoteFiles


_MAX_OPEN = 4096  # local files held open, or a quarter of the descriptors that a process may have
_PIECE = 16 << 20  # bytes of encoded images that a thread holds at once, or one image

Unreadable = dict[int, str]
"""Reasons why samples cannot be read, by their positions among the requested ones."""
Expected = Callable[[slice], Iterator[tuple[slice, EncodedSpans, Unreadable]]]
"""Reads a slice of announced samples, from any thread, in pieces whose images fit into memory; they
are valid until the next piece. Unreadable images are empty. DataError if no file can be read."""


class Reader:
    """Reads samples of an index; a file of many samples stays open between reads."""

    def __init__(self, index: Index, staged: StagedShards | None = None) -> None:
        self._index = index
        self._staged = staged or None  # None too if there is no shard to copy
        self._shared = len(index.file_names) < len(index)  # several samples to a file
        # A file that leaves the cache closes when nobody reads it any more.
        self._local = lru_cache(_max_open())(LocalFile)
        self._is_plain = is_built() and not staged and _is_local(index)
        self._remote: RemoteFiles | None = None
        self._prefetcher: Prefetcher | None = None
        if not _is_local(index):
            self._remote, self._prefetcher = self._from_servers()
        self._memory = threading.local()

    def read(self, sample: int) -> bytes:
        """The encoded image. OSError if it cannot be read whole, DataError if no file can."""
        return self._index.unpacked(sample, self.read_stored(sample))

    def read_stored(self, sample: int) -> bytes:
        """The bytes at the sample's place: like `read`, but Snappy data is not unpacked."""
        name, offset, size = self._index.locate(sample)
        if not self._shared and not offset and not is_remote(name):
            return _whole(name)
        return self.part_of_file(int(self._index.file[sample]), offset, size)

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
        sources, which, offsets, lengths = images
        sources, bad = list(sources), dict(unreadable)
        which, offsets, lengths = which.copy(), offsets.copy(), lengths.copy()
        for position in left.tolist():
            content = b""
            try:
                if position not in bad:
                    content = index.unpacked(int(ids[position]), images.content(position))
            except OSError as error:
                bad[position] = str(error)
            which[position], offsets[position], lengths[position] = len(sources), 0, len(content)
            sources.append(content)
        return EncodedSpans(sources, which, offsets, lengths), bad

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
        core.unpack_snappy(*images.part(places), starts, ends, memory, status)
        sources, which, offsets, lengths = images
        which, offsets, lengths = which.copy(), offsets.copy(), lengths.copy()
        is_done = status == core.OK
        done = places[is_done]
        which[done], lengths[done] = len(sources), sizes[is_done]
        offsets[done] = (ends - sizes)[is_done]
        return EncodedSpans([*sources, memory], which, offsets, lengths), places[~is_done]

    def expect(self, ids: Ids) -> Expected:
        """Announces samples: requests remote ones, and asks the system to read local ones ahead."""
        parts = self._local_parts(ids)
        if parts is not None:
            core.will_need(*parts[0])
        elif self._prefetcher is not None:
            index, remote = self._index, ids[self._to_be_fetched(ids)]
            places = index.file[remote], index.offset[remote], index.size[remote]
            self._prefetcher.expect(remote, *places)
        return partial(self._pieces, ids, parts)

    def expects_enough(self) -> bool:
        """True if announcing more samples gains nothing."""
        return self._prefetcher is None or self._prefetcher.is_full()

    def _pieces(
        self, ids: Ids, parts: tuple[EncodedSpans, Unreadable] | None, part: slice
    ) -> Iterator[tuple[slice, EncodedSpans, Unreadable]]:
        """See Expected. `parts`: spans of open files, which decoding reads."""
        if parts is not None:
            inside = range(part.start, part.stop)
            bad = {n - part.start: why for n, why in parts[1].items() if n in inside}
            yield part, *self.unpacked(ids[part], parts[0].part(part), bad)
            return
        piece = np.cumsum(self.sizes(ids[part])) // _PIECE
        borders = part.start + np.flatnonzero(np.diff(piece)) + 1
        for start, stop in pairwise([part.start, *borders.tolist(), part.stop]):
            yield slice(start, stop), *self._stored(ids[start:stop])

    def _stored(self, ids: Ids) -> tuple[EncodedSpans, Unreadable]:
        """The encoded images of announced samples, maybe in memory that this thread reuses."""
        if self._prefetcher is not None:
            return self.unpacked(ids, *self._fetched(ids, self._prefetcher))
        if self._is_plain and not self._are_parts(ids):
            return self._whole_files(ids)
        contents, unreadable = self._one_by_one(ids)
        return self.unpacked(ids, in_memory(contents), unreadable)

    def _fetched(self, ids: Ids, prefetcher: "Prefetcher") -> tuple[EncodedSpans, Unreadable]:
        """Samples that have been requested; those in copies are read one by one."""
        fetched = prefetcher.take(ids)
        left = np.array([position for position, part in enumerate(fetched) if part is None], int)
        contents, unreadable = self._one_by_one(ids[left])
        rest = iter(contents)
        sources = [next(rest) if part is None else part.content for part in fetched]
        offsets = np.array([0 if part is None else part.offset for part in fetched], np.int64)
        lengths = self.sizes(ids)
        bad = {int(left[position]): why for position, why in unreadable.items()}
        lengths[list(bad)] = 0
        return EncodedSpans(sources, np.arange(len(ids)), offsets, lengths), bad

    def sizes(self, ids: Ids) -> NDArray[np.int64]:
        """Sizes of the encoded images in bytes."""
        sizes: NDArray[np.int64] = self._index.size[ids]
        return sizes

    def _to_be_fetched(self, ids: Ids) -> NDArray[np.bool_]:
        """Mask of the samples that lie on a server and not in a copy on this node."""
        files, which = np.unique(self._index.file[ids], return_inverse=True)
        return np.array([is_remote(self._path(file)) for file in files.tolist()], bool)[which]

    def _are_parts(self, ids: Ids) -> bool:
        """True if the samples are parts of files, False if they are whole files."""
        return self._shared or bool(self._index.offset[ids].any())

    def _one_by_one(self, ids: Ids) -> tuple[list[bytes], Unreadable]:
        contents, unreadable = [], {}
        for position, sample in enumerate(ids.tolist()):
            try:
                contents.append(self.read_stored(sample))
            except OSError as error:
                contents.append(b"")
                unreadable[position] = str(error)
        return contents, unreadable

    def _local_parts(self, ids: Ids) -> tuple[EncodedSpans, Unreadable] | None:
        """Spans of open files, if the samples are parts of local files or of complete copies."""
        if self._is_plain:
            if not self._are_parts(ids):
                return None
            return self._spans(ids, lambda file: self.open_local(self._path(file)))
        staged = self._staged
        if staged is None or not is_built() or not staged.has_all(self._index.file[ids]):
            return None
        spans, unreadable = self._spans(ids, partial(_Copied, self, staged))
        return None if unreadable else (spans, {})  # a copy was deleted by hand

    def open_local(self, path: str) -> LocalFile:
        """A file of this machine, which may be open already. OSError if it cannot be opened."""
        return self._local(path)

    def _spans(
        self, ids: Ids, file_of: Callable[[int], ImageFile]
    ) -> tuple[EncodedSpans, Unreadable]:
        files, which = np.unique(self._index.file[ids], return_inverse=True)
        offsets, lengths = self._index.offset[ids], self.sizes(ids)
        sources, unreadable = list[bytes | ImageFile](), dict[int, str]()
        for number, file in enumerate(files.tolist()):
            try:
                sources.append(file_of(file))
            except OSError as error:
                sources.append(b"")
                gone = np.flatnonzero(which == number)
                offsets[gone] = lengths[gone] = 0
                unreadable |= dict.fromkeys(gone.tolist(), str(error))
        which = which.astype(np.int64, copy=False)
        return EncodedSpans(sources, which, offsets, lengths), unreadable

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
        """The path or URL of a file: of its copy on this node, if there is one."""
        if self._staged is not None:
            return self._staged.path_of(file)
        return self._source_of(file)

    def _source_of(self, file: int) -> str:
        return os.path.join(self._index.root, self._index.file_names[file])

    def _from_servers(self) -> "tuple[RemoteFiles, Prefetcher]":
        from trainyard.data.storage.remote.prefetch import (
            Prefetcher,
            RemoteFiles,  # loads aiohttp
        )

        return RemoteFiles(self._stamp_of), Prefetcher(self.fetch_part)

    async def fetch_part(self, file: int, offset: int, size: int) -> bytes:
        """Bytes of a remote file of the index, in the event loop. Errors as in `read`."""
        assert self._remote is not None
        return await self._remote.fetch(self._source_of(file), offset, size)

    def part_of_file(self, file: int, offset: int, size: int) -> bytes:
        """Bytes of a file of the index, or of its copy. Errors as in `read`."""
        if self._staged is not None and self._staged.has(file):
            try:
                return self._part(self._path(file), offset, size)
            except OSError:  # the copy was deleted by hand, or the disk is bad
                self._staged.forget(file)
        return self._part(self._path(file), offset, size)

    def _part(self, name: str, offset: int, size: int) -> bytes:
        if self._remote is not None and is_remote(name):
            return self._remote.read(name, offset, size)
        return self._local(name).read(offset, size)

    def _stamp_of(self, name: str) -> Stamp | None:
        """The file's stamp when it was indexed; None if the index has none."""
        return self._index.stamps.get(name.removeprefix(os.path.join(self._index.root, "")))


class _Copied:
    """The open copy of a file. What it lacks is read from the file itself."""

    def __init__(self, reader: Reader, staged: StagedShards, file: int) -> None:
        self._reader, self._staged, self._file = reader, staged, file
        self._copy = reader.open_local(staged.path_of(file))

    def fileno(self) -> int:
        return self._copy.fileno()

    def read(self, offset: int, size: int) -> bytes:
        try:
            return self._copy.read(offset, size)
        except OSError:  # a bad disk, or cut short by hand
            self._staged.forget(self._file)
        return self._reader.part_of_file(self._file, offset, size)


def _max_open() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_OPEN if limit == resource.RLIM_INFINITY else min(_MAX_OPEN, limit // 4)


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


_CHUNK = 64  # samples announced together
_AHEAD = 4  # chunks


def read_ahead(reader: Reader, ids: Ids) -> Iterator[bytes | OSError]:
    """The encoded image of each sample in order, or the error of one that cannot be read.

    Remote ones are requested many at a time, as in training.
    """
    chunks = iter([ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)])
    ahead: deque[tuple[int, Expected]] = deque()
    while True:
        ahead += ((len(some), reader.expect(some)) for some in islice(chunks, _AHEAD - len(ahead)))
        if not ahead:
            return
        count, read = ahead.popleft()
        for piece, images, unreadable in read(slice(0, count)):
            yield from (_content(images, unreadable, n) for n in range(piece.stop - piece.start))


def _content(images: EncodedSpans, unreadable: Unreadable, position: int) -> bytes | OSError:
    if position in unreadable:
        return OSError(unreadable[position])
    try:
        return images.content(position)
    except OSError as error:
        return error
