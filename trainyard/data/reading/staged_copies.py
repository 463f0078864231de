"""Copies of a data set's files in a folder of this node, and the locks of their users.

    FOLDER/trainyard-stage/KEY/17                 a complete copy: file 17 of the index, or for
                                                  single image files samples 17 * 512 and on
                              17.146800640.part   an unfinished copy and its final size, by the
                                                  process that holds the lock or one that died
                              stager.lock         held by the one process that makes copies

Each user of a data set holds a shared lock on its folder; a data set in use is not evicted. All
locks are flocks, which end with their process, however it ends.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.index.table import Index
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError
from trainyard.files import fsync, is_at

GROUP = 512  # samples that share a copy if most are single files
_FEW = 16  # average samples per file; below it, files are single images, not shards
_FOLDER = "trainyard-stage"
_SETTLED_S = 1.0  # for less, a folder may change again without another time of change
_TELL_S = 3600  # time for which other processes do not repeat a message


class CannotStage(Exception):
    """No more copies can be made here, for the reason given; existing copies can be used."""


class Copy(NamedTuple):
    """The position of a sample in a copy."""

    number: int
    path: str
    offset: int
    size: int


class Copies:
    """The copies of one data set, in use until `close` or the end of the process."""

    def __init__(self, index: Index, folder: Path) -> None:
        self._index = index
        self.is_grouped = len(index) < _FEW * len(index.file_names)
        """True if each copy holds a group of samples, False if it is a file of the index."""
        self.path = folder / _FOLDER / _key(index, self.is_grouped)
        try:
            self._users_fd = _open_shared(self.path)
        except OSError as error:
            where = f"{folder} on {socket.gethostname()}"
            raise DataError(f"{where} cannot hold copies of data: {error.strerror}") from None
        looks = self.path.parent.stat(), self.path.parent.lstat()  # who has a link may turn it
        if not {look.st_uid for look in looks} <= {0, os.getuid()}:
            self.close()
            raise DataError(
                f"{self.path.parent} on {socket.gethostname()} belongs to another user, who could "
                "change the data: use a folder of your own"
            )
        self._listings: dict[Path, _Listing] = {}  # of the process that makes copies
        with suppress(PermissionError):  # made by root, say in a prologue of the job
            os.utime(self.path)  # the most recently used
        self.refresh()

    def __len__(self) -> int:
        """Number of copies once all are made."""
        return -(-len(self._index) // GROUP) if self.is_grouped else len(self._index.file_names)

    def close(self) -> None:
        os.close(self._users_fd)

    def find(self, sample: int) -> Copy | None:
        """The copy of a sample, None if `refresh` has not seen one; costs no system call."""
        index = self._index
        number = sample // GROUP if self.is_grouped else int(index.file[sample])
        if number not in self._ready:
            return None
        offset = int(index.offset[sample])
        if self.is_grouped:
            offset = int(index.size[number * GROUP : sample].sum())
        return Copy(number, self.path_of(number), offset, int(index.size[sample]))

    def path_of(self, number: int) -> str:
        return str(self.path / str(number))

    def hold(self, files: NDArray[np.int32]) -> bool:
        """True if `refresh` has seen a copy of each of these files; False for copies of groups."""
        return not self.is_grouped and self._ready.issuperset(np.unique(files).tolist())

    def refresh(self) -> None:
        """Lists the existing copies."""
        try:
            self._ready = {int(name) for name in os.listdir(self.path) if name.isdecimal()}
        except FileNotFoundError:  # removed by hand
            self._ready = set()

    def missing(self) -> list[int]:
        return [number for number in range(len(self)) if number not in self._ready]

    def forget(self, number: int) -> None:
        """Drops a copy that cannot be read."""
        self._ready = self._ready - {number}

    def num_bytes(self) -> int:
        """Bytes of all copies, including the unfinished one."""
        return sum(file.size for file in _files(self.path))

    def is_news(self) -> bool:
        """True if no process has reported in the last hour that no more copies can be made."""
        told = self.path / "told"
        with suppress(OSError):
            if time.time() - told.stat().st_mtime < _TELL_S:
                return False
        with suppress(OSError):
            told.touch()
        return True

    # --- for the process that makes copies ---

    @contextmanager
    def leading(self) -> Iterator[bool]:
        """True if this process is the one to make copies until the end of the block."""
        with explained(self.path):
            fd = os.open(self.path / "stager.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        self._listings.clear()  # another process may have made copies since
        try:
            yield _lock_at_once(fd)
        finally:
            os.close(fd)

    def begin(self, number: int, size: int, cap: int | None) -> Path:
        """The file to write a copy into, possibly begun by an earlier process; reserves its space.

        Copies of other data sets are evicted if necessary. Processes that copy into the same folder
        pass here one at a time.
        """
        part = self.path / f"{number}.{size}.part"
        with explained(self.path), _exclusive(self.path.parent):
            part.touch()
            if self.path in self._listings:
                self._listings[self.path].add(part, size)
            excess = self._excess(cap)
            if excess > 0:
                self._listings.clear()  # someone may have deleted copies
                excess = self._excess(cap)
            if excess > 0 and not _evict(self.path.parent, excess):
                part.unlink()
                raise CannotStage("there is no room for more")
        return part

    def _excess(self, cap: int | None) -> int:
        """Bytes by which the copies, once they are complete, exceed the disk or the cap."""
        listings = [self._listing(path) for path in _folders(self.path.parent)]
        usage = shutil.disk_usage(self.path)
        growth = sum(listing.growth() for listing in listings)
        excess = growth + _reserve(usage.total) - usage.free
        if cap is not None:
            excess = max(excess, sum(listing.complete for listing in listings) - cap)
        return excess

    def _listing(self, path: Path) -> "_Listing":
        """The files of a data set; lists its own once, and others again after each change."""
        changed_ns = path.stat().st_ctime_ns
        known = self._listings.get(path)
        if known is not None and (path == self.path or known.changed_ns == changed_ns):
            return known
        found = _Listing(path, changed_ns)
        if path == self.path or time.time_ns() - changed_ns > _SETTLED_S * 1e9:
            self._listings[path] = found
        return found

    def check_room(self) -> None:
        """CannotStage if the disk is nearly full, by others' files."""
        usage = shutil.disk_usage(self.path)
        if usage.free < _reserve(usage.total):
            raise CannotStage("the disk is nearly full")

    def finish(self, number: int, part: Path) -> None:
        """Publishes a copy that is complete and on disk."""
        with explained(self.path), _exclusive(self.path.parent):  # so that it is not counted twice
            os.replace(part, self.path / str(number))
            if self.path in self._listings:
                self._listings[self.path].parts.pop(str(part), None)
            fsync(self.path)
        self._ready = self._ready | {number}


class _File(NamedTuple):
    path: str
    size: int  # bytes, now
    complete: int  # bytes, once it is complete


def _files(folder: Path) -> list[_File]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process has removed it
                size = entry.stat().st_size
                complete = int(entry.name.split(".")[1]) if entry.name.endswith(".part") else size
                found.append(_File(entry.path, size, complete))
    return found


class _Listing:
    """The files of a data set's folder: listing them for every copy would take quadratic time."""

    def __init__(self, folder: Path, changed_ns: int) -> None:
        files = _files(folder)
        self.changed_ns = changed_ns
        self.complete = sum(file.complete for file in files)  # bytes, once all are complete
        self.parts = {file.path: file.complete for file in files if file.path.endswith(".part")}

    def add(self, part: Path, size: int) -> None:
        if str(part) not in self.parts:
            self.parts[str(part)] = size
            self.complete += size

    def growth(self) -> int:
        """Bytes that the unfinished copies still need."""
        growth = 0
        for path, size in [*self.parts.items()]:
            try:
                growth += size - os.stat(path).st_size
            except FileNotFoundError:  # given up
                del self.parts[path]
                self.complete -= size
        return growth


def _folders(parent: Path) -> list[Path]:
    """The folders of data sets, the least recently used first."""
    return sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime)


def _key(index: Index, is_grouped: bool) -> str:
    """A key of the copied files in the state in which they were indexed.

    Two splits of the same files share the copies.
    """
    is_path = index.root and not is_remote(index.root)  # a merged index has absolute names
    root = os.path.realpath(index.root) if is_path else index.root
    names = [] if is_grouped else [*index.file_names]
    stamps = {name: index.stamps.get(name) for name in names}
    if is_grouped or None in stamps.values():
        stamps = index.stamps | {"": [index.fingerprint]}
    return hashlib.sha256(json.dumps([root, stamps]).encode()).hexdigest()[:16]


def _reserve(total: int) -> int:
    """Bytes of disk space that staging leaves free: a twentieth, from 1 GB to 50 GB."""
    return min(max(10**9, total // 20), 50 * 10**9)


def _evict(parent: Path, excess: int) -> bool:
    """Deletes unused copies, the least recently used first; none if that frees too little."""
    with ExitStack() as stack:
        unused = []
        for path in _folders(parent):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            if _lock_at_once(fd):
                unused.append(path)
        if sum(file.complete for path in unused for file in _files(path)) < excess:
            return False
        for path in unused:
            used_at = path.stat().st_mtime_ns
            for file in _files(path):
                if excess <= 0:
                    os.utime(path, ns=(used_at, used_at))  # deletion does not count as use
                    return True
                excess -= file.complete
                os.unlink(file.path)
            path.rmdir()
    return True


# --- locks ---


def _open_shared(path: Path) -> int:
    """A descriptor of a folder, created if necessary, with a shared lock on it."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if path.exists():
                raise
            continue  # evicted just now
        with suppress(FileNotFoundError):  # or evicted since
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if is_at(path, fd):
                return fd
            os.close(fd)


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _lock_at_once(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """CannotStage for an error of the node's own disk."""
    try:
        yield
    except OSError as error:
        raise CannotStage(f"{error.filename or path}: {error.strerror}") from None
