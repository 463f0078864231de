"""Reads the stored bytes of samples by offset, from any thread."""

import os
import resource
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import core, is_built
from trainyard.data.arrays import Bytes, Int32s
from trainyard.data.index.table import Index
from trainyard.data.reading.ahead import Group, Images, ReadAhead, Unreadable
from trainyard.data.reading.staging import StagedShards
from trainyard.data.sampler.plan import Ids
from trainyard.data.storage.encoded import EncodedSpans, ImageFile, in_memory
from trainyard.data.storage.open import remote_file
from trainyard.data.storage.source import READ_ONLY, LocalFile, is_remote

if TYPE_CHECKING:
    from trainyard.data.storage.remote.prefetch import Prefetcher
    from trainyard.data.storage.remote.remote_file import RemoteFile


_MAX_OPEN = 4096  # local files held open, or an eighth of the descriptors that a process may have
_MAX_REMOTE = 1024  # remote files whose state is kept
_PIECE = 16 << 20  # bytes of encoded images that a thread holds at once, or one image
_Ends = NDArray[np.int64]
_Memory = Callable[[int], Bytes]
_new_memory: _Memory = partial(np.empty, dtype=np.uint8)  # type: ignore[assignment]
IN_FILE, REQUESTED, UNREAD = -1, -2, -3  # ways to a sample; a group's number is another


class Ticket:
    """Announced samples: any thread reads any part of them, each sample once."""

    def __init__(self, reader: "Reader", ids: Ids) -> None:
        """Requests the samples from servers, or has threads read them from slow storage."""
        self._reader, self._ids = reader, ids
        self._spans, self._way = reader.announce(ids)
        self._groups = dict[int, Group]()  # those with images that were not used yet
        self._lock = threading.Lock()
        left = np.flatnonzero(self._way == UNREAD)
        for number, rows in enumerate(reader.ahead.groups_of(left)):
            self._way[rows] = number
            read, size = partial(reader.read_all, ids[rows]), int(self._spans.lengths[rows].sum())
            self._groups[number] = reader.ahead.announce(read, rows, size)
        reader.ahead.start()

    def read(self, part: slice) -> Iterator[tuple[slice, EncodedSpans, Unreadable]]:
        """The images in pieces that fit into memory, each valid until the next one.

        Unreadable images are empty. DataError if no image of a file can be read.
        """
        borders = [part.start, part.stop]
        if (self._way[part] != IN_FILE).any():
            piece = np.cumsum(self._spans.lengths[part]) // _PIECE
            borders[1:1] = (part.start + 1 + np.flatnonzero(np.diff(piece))).tolist()
        for rows in map(slice, borders, borders[1:]):
            yield rows, *self._reader.unpacked(self._ids[rows], self._stored(rows))
            if self._groups:
                self._release(self._way[rows])

    def _stored(self, part: slice) -> Images:
        ids, way, images = self._ids[part], self._way[part], Images(self._spans.part(part), {})
        for number in np.unique(way[way != IN_FILE]).tolist():
            rows = np.flatnonzero(way == number)
            if number == REQUESTED:
                read = self._reader.fetched(ids[rows])
            elif number == UNREAD:
                read = self._reader.read_now(ids[rows])
            else:
                read = self._groups[number].images(rows + part.start)
            images = read if len(rows) == len(way) else images.replaced(rows, read)
        return images

    def _release(self, way: Int32s) -> None:
        """Frees the groups whose images are all used."""
        with self._lock:
            for number, count in zip(*np.unique(way[way >= 0], return_counts=True), strict=True):
                self._groups[number].num_unused -= count
                if not self._groups[number].num_unused:
                    del self._groups[number]
        self._reader.ahead.start()


class _OpenFiles:
    """Local files that stay open; the least recently used close when nobody reads them."""

    def __init__(self, most: int) -> None:
        self._most, self._files = most, OrderedDict[str, LocalFile]()
        self._lock = threading.Lock()

    def if_open(self, path: str) -> LocalFile | None:
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
            return self._files.get(path)

    def opened(self, path: str) -> LocalFile:
        """OSError if the file cannot be opened."""
        return self.if_open(path) or self.add(path)

    def add(self, path: str, descriptor: int | None = None) -> LocalFile:
        """A file that is opened now, or was. OSError if it cannot be opened."""
        file = LocalFile(path, descriptor)
        with self._lock:
            self._files[path] = file
            if len(self._files) > self._most:
                self._files.popitem(last=False)
        return file


class Reader:
    """Reads samples of an index; a file of many samples stays open between reads."""

    def __init__(self, index: Index, staged: StagedShards | None = None) -> None:
        self._index = index
        self._staged = staged or None  # None too if there is no shard to copy
        self._shared = len(index.file_names) < len(index)  # several samples to a file
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        is_free = limit == resource.RLIM_INFINITY
        most_open = _MAX_OPEN if is_free else min(_MAX_OPEN, max(1, limit // 8))
        self._local = _OpenFiles(most_open)
        self.ahead = ReadAhead(most_open)
        self._remote = lru_cache(_MAX_REMOTE)(partial(_remote_file, index))
        self._prefetcher = None if _is_local(index) else self._requests()
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

    def unpacked(self, ids: Ids, stored: Images) -> Images:
        """The images, with those in Snappy data unpacked into memory of their own."""
        index = self._index
        if index.snappy_length is None:
            return stored
        left = np.flatnonzero(index.snappy_length[ids])
        if is_built():
            stored, left = self._natively_unpacked(ids, stored, left)
        contents, bad = [], {}
        for number, position in enumerate(left.tolist()):
            contents.append(b"")
            try:
                if position not in stored.unreadable:
                    content = stored.spans.content(position)
                    contents[-1] = index.unpacked(int(ids[position]), content)
            except OSError as error:
                bad[number] = str(error)
        return stored.replaced(left, Images(in_memory(contents), bad))

    def _natively_unpacked(
        self, ids: Ids, stored: Images, rows: NDArray[np.intp]
    ) -> tuple[Images, NDArray[np.intp]]:
        """The images with those at `rows` unpacked, and the rows where that failed."""
        index, samples = self._index, ids[rows]
        assert index.snappy_start is not None and index.snappy_length is not None
        starts = index.snappy_start[samples].astype(np.int64)
        sizes = index.snappy_length[samples].astype(np.int64)
        ends, status = np.cumsum(sizes - np.minimum(starts, 0)), np.zeros(len(rows), np.uint8)
        memory = self._room(int(ends[-1]) if len(ends) else 0)
        core.unpack_snappy(*stored.spans.part(rows), starts, ends, memory, status)
        is_done = status == core.OK
        spans = EncodedSpans([memory], np.zeros_like(ends), ends - sizes, sizes).part(is_done)
        return stored.replaced(rows[is_done], Images(spans, {})), rows[~is_done]

    def prefetch(self, ids: Ids) -> Ticket:
        """Announces samples."""
        return Ticket(self, ids)

    def announce(self, ids: Ids) -> tuple[EncodedSpans, Int32s]:
        """Requests samples from servers. Returns spans of open files, and the way to each sample.

        The way is IN_FILE only for what can be read without waiting for storage.
        """
        index = self._index
        files, of_file = np.unique(index.file[ids], return_inverse=True)
        of_file = of_file.astype(np.int64, copy=False)
        spans = EncodedSpans([b""] * len(files), of_file, index.offset[ids], index.size[ids])
        way = np.full(len(ids), UNREAD, np.int32)
        if self._prefetcher is not None:
            remote = [is_remote(self._path(file)) for file in files.tolist()]
            way[np.array(remote, bool)[of_file]] = REQUESTED
            asked = ids[way == REQUESTED]
            where = index.file[asked], index.offset[asked], index.size[asked]
            self._prefetcher.expect(asked, *where)
        if is_built() and (way == UNREAD).any() and self._are_parts(ids):
            opened = [self._if_open(file) for file in files.tolist()]
            spans = spans._replace(sources=[file or b"" for file in opened])
            rows = np.flatnonzero(np.array([file is not None for file in opened], bool)[of_file])
            is_ready = np.zeros(len(rows), bool)
            core.will_need(*spans.part(rows), is_ready)
            way[rows[is_ready]] = IN_FILE
        return spans, way

    def is_far_enough_ahead(self) -> bool:
        """True if announcing more samples gains nothing."""
        has_requested = self._prefetcher is None or self._prefetcher.is_full()
        return has_requested and self.ahead.is_far_enough()

    def read_now(self, ids: Ids) -> Images:
        """Like `read_all`, into memory of this thread that its next call uses again."""
        return self.read_all(ids, self._room)

    def read_all(self, ids: Ids, memory: _Memory = _new_memory) -> Images:
        """Local samples, end to end; their files are opened by one call, and stay open if shared.

        An image file whose size has changed since it was indexed is read as it is now.
        """
        if not is_built():
            begun = time.perf_counter()
            images = self._one_by_one(ids)
            self.ahead.judge(time.perf_counter() - begun, len(ids))
            return images
        index, lengths, opened = self._index, self._index.size[ids], list[LocalFile | None]()
        files = np.full(len(ids), -1, np.int32)
        starts, paths = np.full(len(ids), -1), list[str]()
        if self._are_parts(ids):
            starts, paths = index.offset[ids], list(map(self._path, index.file[ids].tolist()))
            opened = list(map(self._local.if_open, paths))
            files[:] = [-1 if file is None else file.fileno() for file in opened]
        ends = np.cumsum(lengths)
        offsets, content = ends - lengths, memory(int(ends[-1]) if len(ids) else 0)
        errors, names = np.zeros(len(ids), np.int32), self._names(ids, paths)
        waited = core.read_spans(*names, starts, offsets, lengths, content, files, errors)
        self.ahead.judge(waited, len(ids))
        for path, file, descriptor in zip(paths, opened, files.tolist(), strict=False):
            if file is None and descriptor >= 0:
                with suppress(OSError):  # a device: it is read, and not kept open
                    self._local.add(path, descriptor)
        images = Images(EncodedSpans([content], np.zeros_like(lengths), offsets, lengths), {})
        failed = np.flatnonzero(errors)
        return images.replaced(failed, self._one_by_one(ids[failed])) if len(failed) else images

    def _names(self, ids: Ids, paths: list[str]) -> tuple[bytes, Bytes, _Ends, _Ends]:
        """A root, names below it end to end, and where those of some samples begin and end.

        `paths`: of the samples, if they are not the files of the index below its root.
        """
        if paths:
            encoded = list(map(os.fsencode, paths))
            ends = np.cumsum([len(path) for path in encoded])
            text = np.frombuffer(b"".join(encoded), np.uint8)
            return b"", text, ends - np.diff(ends, prepend=0), ends
        names, files = self._index.file_names, self._index.file[ids]
        begins = np.where(files > 0, names.ends[files - 1], 0)
        return os.fsencode(self._index.root), names.text, begins, names.ends[files]

    def fetched(self, ids: Ids) -> Images:
        """Samples that have been requested; those that did not come are read one by one."""
        assert self._prefetcher is not None
        fetched = self._prefetcher.take(ids)
        content = [b"" if part is None else part.content for part in fetched]
        offsets = np.array([0 if part is None else part.offset for part in fetched], np.int64)
        spans = EncodedSpans(content, np.arange(len(ids)), offsets, self._index.size[ids])
        left = np.array([position for position, part in enumerate(fetched) if part is None], int)
        return Images(spans, {}).replaced(left, self._one_by_one(ids[left]))

    def _are_parts(self, ids: Ids) -> bool:
        """True if the samples are parts of files, False if they are whole files."""
        return self._shared or bool(self._index.offset[ids].any())

    def _one_by_one(self, ids: Ids) -> Images:
        contents, unreadable = [], {}
        for position, sample in enumerate(ids.tolist()):
            try:
                contents.append(self.read_stored(sample))
            except OSError as error:
                contents.append(b"")
                unreadable[position] = str(error)
        return Images(in_memory(contents), unreadable)

    def _if_open(self, file: int) -> ImageFile | None:
        """A local file or copy, if it is open already."""
        opened, staged = self._local.if_open(self._path(file)), self._staged
        if opened is not None and staged is not None and staged.has(file):
            return _Copied(opened, partial(self.part_of_file, file))
        return opened

    def _room(self, size: int) -> Bytes:
        """This thread's buffer, of at least `size` bytes."""
        memory: Bytes | None = getattr(self._memory, "kept", None)
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

    def _requests(self) -> "Prefetcher":
        from trainyard.data.storage.remote.prefetch import Prefetcher  # loads aiohttp

        return Prefetcher(self.fetch_part)

    async def fetch_part(self, file: int, offset: int, size: int) -> bytes:
        """Bytes of a remote file of the index, in the event loop. Errors as in `read`."""
        return await self._remote(self._source_of(file)).fetch(offset, size)

    def part_of_file(self, file: int, offset: int, size: int) -> bytes:
        """Bytes of a file of the index, or of its copy. Errors as in `read`."""
        if self._staged is not None and self._staged.has(file):
            try:
                return self._part(self._path(file), offset, size)
            except OSError:  # the copy was deleted or cut short by hand, or the disk is bad
                self._staged.forget(file)
        return self._part(self._path(file), offset, size)

    def _part(self, name: str, offset: int, size: int) -> bytes:
        if is_remote(name):
            return self._remote(name).read(offset, size)
        return self._local.opened(name).read(offset, size)


class _Copied:
    """The open copy of a file. What it lacks is read by `instead`."""

    def __init__(self, copy: LocalFile, instead: Callable[[int, int], bytes]) -> None:
        self._copy, self.read = copy, instead

    def fileno(self) -> int:
        return self._copy.fileno()


def _remote_file(index: Index, url: str) -> "RemoteFile":
    name = url.removeprefix(os.path.join(index.root, ""))
    return remote_file(url).indexed(index.stamps.get(name))


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
    ahead: deque[tuple[int, Ticket]] = deque()
    while True:
        ahead += (
            (len(some), reader.prefetch(some)) for some in islice(chunks, _AHEAD - len(ahead))
        )
        if not ahead:
            return
        count, ticket = ahead.popleft()
        for piece, images, unreadable in ticket.read(slice(0, count)):
            yield from (_content(images, unreadable, n) for n in range(piece.stop - piece.start))


def _content(images: EncodedSpans, unreadable: Unreadable, position: int) -> bytes | OSError:
    if position in unreadable:
        return OSError(unreadable[position])
    try:
        return images.content(position)
    except OSError as error:
        return error
