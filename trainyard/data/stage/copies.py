"""Copies of a data set's files in a folder of this node: which there are, who uses them.

    FOLDER/trainyard-stage/KEY/17                 a complete copy: file 17 of the index, or where
                                                  images are single files samples 17 * 512 and on
                              17.146800640.part   one in the making and its size when complete,
                                                  by the process that has the lock or one that died
                              stager.lock         held by the one process that makes copies

Whoever uses a data set holds a shared lock on its folder, and what is in use is not evicted. All
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

from trainyard.data.index import Index
from trainyard.data.source import is_remote
from trainyard.errors import DataError
from trainyard.files import fsync_folder, is_at

GROUP = 512  # samples that share a copy where most are files of their own
_FEW = 16  # samples to a file, on average: not shards, but single images
_FOLDER = "trainyard-stage"
_TELL_S = 3600  # how long other processes and evaluations keep quiet about what was told


class CannotStage(Exception):
    """No more copies can be made here; the message says why. What is there can be used."""


class Copy(NamedTuple):
    """Where a sample lies in a copy."""

    number: int
    path: str
    offset: int
    size: int


class Copies:
    """The copies of one data set, in use from now until `close` or the end of the process."""

    def __init__(self, index: Index, folder: Path) -> None:
        self._index = index
        self.is_grouped = len(index) < _FEW * len(index.file_names)
        """Each copy holds a group of samples; else it is a file of the index."""
        self.path = folder / _FOLDER / _key(index, self.is_grouped)
        try:
            self._users_fd = _open_shared(self.path)
        except OSError as error:
            where = f"{folder} on {socket.gethostname()}"
            raise DataError(f"{where} cannot hold copies of data: {error.strerror}") from None
        if self.path.parent.stat().st_uid not in (0, os.getuid()):
            self.close()
            raise DataError(
                f"{self.path.parent} on {socket.gethostname()} belongs to another user, who might "
                "put anything there: stage to a folder of your own"
            )
        with suppress(PermissionError):  # made by root, in a prologue of the job say
            os.utime(self.path)  # the most recently used
        self.refresh()

    def __len__(self) -> int:
        """How many there are once all are made."""
        return -(-len(self._index) // GROUP) if self.is_grouped else len(self._index.file_names)

    def close(self) -> None:
        os.close(self._users_fd)

    def find(self, sample: int) -> Copy | None:
        """The copy of a sample, as far as `refresh` has seen it; costs no system call."""
        index = self._index
        number = sample // GROUP if self.is_grouped else int(index.file[sample])
        if number not in self._ready:
            return None
        offset = int(index.offset[sample])
        if self.is_grouped:
            offset = int(index.size[number * GROUP : sample].sum())
        return Copy(number, str(self.path / str(number)), offset, int(index.size[sample]))

    def refresh(self) -> None:
        """Look which copies there are."""
        try:
            self._ready = {int(name) for name in os.listdir(self.path) if name.isdigit()}
        except FileNotFoundError:  # removed by hand
            self._ready = set()

    def missing(self) -> list[int]:
        return [number for number in range(len(self)) if number not in self._ready]

    def forget(self, number: int) -> None:
        """A copy turned out not to be readable."""
        self._ready = self._ready - {number}

    def num_bytes(self) -> int:
        """Of all copies, with what there is of the one in the making."""
        return sum(file.size for file in _files(self.path))

    def is_news(self) -> bool:
        """Whether nobody was told lately that no more copies can be made."""
        told = self.path / "told"
        with suppress(OSError):
            if time.time() - told.stat().st_mtime < _TELL_S:
                return False
        with suppress(OSError):
            told.touch()
        return True

    # --- for the one that makes them ---

    @contextmanager
    def leading(self) -> Iterator[bool]:
        """Whether this process is the one to make copies, until the end of the block."""
        with explained(self.path):
            fd = os.open(self.path / "stager.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            yield _lock_at_once(fd)
        finally:
            os.close(fd)

    def begin(self, number: int, size: int, cap: int | None) -> Path:
        """The file in which to make a copy, with what there is of it; its room is reserved.

        Copies of other data sets make room if they must. Of other processes that copy into the
        same folder, one at a time is let in here.
        """
        part = self.path / f"{number}.{size}.part"
        with explained(self.path), _exclusive(self.path.parent):
            part.touch()
            files = [file for path in _folders(self.path.parent) for file in _files(path)]
            growth = sum(file.complete - file.size for file in files)
            usage = shutil.disk_usage(self.path)
            excess = growth + _reserve(usage.total) - usage.free
            if cap is not None:
                excess = max(excess, sum(file.complete for file in files) - cap)
            if excess > 0 and not _evict(self.path.parent, excess):
                part.unlink()
                raise CannotStage("there is no room for more")
        return part

    def check_room(self) -> None:
        """CannotStage if others are filling the disk."""
        usage = shutil.disk_usage(self.path)
        if usage.free < _reserve(usage.total):
            raise CannotStage("the disk is nearly full")

    def finish(self, number: int, part: Path) -> None:
        """Publish a copy that is complete and on disk."""
        with explained(self.path), _exclusive(self.path.parent):  # lest it be counted twice
            os.replace(part, self.path / str(number))
            fsync_folder(self.path)
        self._ready = self._ready | {number}


class _File(NamedTuple):
    path: str
    size: int  # bytes, now
    complete: int  # bytes, once it is complete


def _files(folder: Path) -> list[_File]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process is done with it
                size = entry.stat().st_size
                complete = int(entry.name.split(".")[1]) if entry.name.endswith(".part") else size
                found.append(_File(entry.path, size, complete))
    return found


def _folders(parent: Path) -> list[Path]:
    """Of data sets, the least recently used first."""
    return sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime)


def _key(index: Index, is_grouped: bool) -> str:
    """Names what is copied: the files as they were when they were indexed.

    Two splits of the same files share the copies.
    """
    is_path = index.root and not is_remote(index.root)  # of a merged index the names are whole
    root = os.path.realpath(index.root) if is_path else index.root
    names = [] if is_grouped else [index.file_names[row] for row in range(len(index.file_names))]
    stamps = {name: index.stamps.get(name) for name in names}
    if is_grouped or None in stamps.values():
        stamps = index.stamps | {"": [index.fingerprint]}
    return hashlib.sha256(json.dumps([root, stamps]).encode()).hexdigest()[:16]


def _reserve(total: int) -> int:
    """Bytes of a disk that staging leaves free."""
    return max(10**9, total // 20)


def _evict(parent: Path, excess: int) -> bool:
    """Delete copies that nobody uses, least recently used first; none if they are too few."""
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
                    os.utime(path, ns=(used_at, used_at))  # deleting is not using
                    return True
                excess -= file.complete
                os.unlink(file.path)
            path.rmdir()
    return True


# --- locks ---


def _open_shared(path: Path) -> int:
    """A descriptor of a folder, made if need be, with a shared lock on it."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if path.exists():
                raise
            continue  # evicted just now
        with suppress(FileNotFoundError):  # or now
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
