"""Staging: copies shards to a node's own disk while training reads them at their source.

    FOLDER/trainyard-stage/ID         a complete copy; ID is a hash of the shard's path and stamp
                           .ID.part   an unfinished copy, locked by the process that writes it
                           ID.lock    held by the one process of the node that copies a data set

The locks are flocks: they end with their process, and another process goes on. No copy is deleted:
once the cap or the disk is reached, the rest is read at its source.
"""

import fcntl
import hashlib
import os
import re
import shutil
import socket
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainyard.data.index.stamps import of_content
from trainyard.data.index.table import Index, digest_of
from trainyard.data.storage.ahead import map_ahead
from trainyard.data.storage.manifest import manifest_of, shards_listed
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source, real_path
from trainyard.errors import DataError
from trainyard.files import in_words, sole_write

_FOLDER = "trainyard-stage"
_BLOCK = 8 << 20  # bytes of a shard read at once
_NUM_READS = 8  # blocks in flight; hides the latency of a server
_ATTEMPTS = 3  # at a shard that arrives damaged


class _Unreadable(Exception):
    """A shard cannot be read now; reading its samples from the source reports it."""


class _NoRoom(Exception):
    """A copy does not fit, for the reason given."""


class _Damaged(Exception):
    """What arrived does not have the checksum of the source."""


class StagedShards:
    """The shards of a data set, and their copies on this node. Single images have no copies."""

    def __init__(self, index: Index, folder: str, cap_gb: float | None = None) -> None:
        """DataError if the folder cannot hold copies, or belongs to another user."""
        self._index, self._cap = index, None if cap_gb is None else int(cap_gb * 1e9)
        self.folder = stage_folder(folder) / _FOLDER
        _make_own(self.folder)
        self._copies = {file: self.folder / _id(index, file) for file in _shards(index)}
        self._lock: int | None = None
        # Threads read these two sets; they only grow.
        self._present: set[int] = set()
        self._lost: set[int] = set()
        self.num_made = 0
        """Copies made by this process."""
        self.refresh()

    def __len__(self) -> int:
        """Number of copies once all are made."""
        return len(self._copies)

    def path_of(self, file: int) -> str:
        """The path of a file's copy, or the path or URL of the source if there is none yet."""
        return str(self._copies[file]) if self.has(file) else self._source(file)

    def has(self, file: int) -> bool:
        """True if a copy of the file has been seen; costs no system call."""
        return file in self._present and file not in self._lost

    def forget(self, file: int) -> None:
        """From now on the file is read at its source: its copy was deleted, or cannot be read."""
        self._lost.add(file)

    def refresh(self) -> None:
        """Looks for copies that other processes have made."""
        there = set(os.listdir(self.folder))
        self._present.update(file for file, copy in self._copies.items() if copy.name in there)

    def missing(self) -> list[int]:
        """The numbers of the files without a copy."""
        return [file for file in self._copies if file not in self._present]

    def num_bytes(self) -> int:
        """Bytes of the complete copies."""
        return sum(self._copies[file].stat().st_size for file in self._copies if self.has(file))

    # --- copying ---

    def start(self) -> "Future[str | None]":
        """Starts `run` in a thread."""
        return ThreadPoolExecutor(1).submit(self.run)

    def run(self, look_s: float = 2.0) -> str | None:
        """Copies all shards, or waits for the process that does; the reason if some are left.

        A process that waits for another one looks for new copies every `look_s` seconds.
        DataError if a shard has changed since it was indexed, or is damaged. If shards are left,
        this process keeps the lock: no other one of the node tries again and reports it too.
        """
        remark = f"{self._index.root}: single images are not staged: `data pack` makes shards"
        try:
            if not self._copies:
                return remark if self._leads() else None
            while self.missing():
                if self._leads() and self._copy_all():
                    break
                time.sleep(look_s)
                self.refresh()
        except (_NoRoom, _Unreadable, OSError) as problem:
            there = len(self) - len(self.missing())
            return (
                f"staging to {self.folder} on {socket.gethostname()} ends with {there:,} of "
                f"{len(self):,} shards, the rest is read at the source: {problem}"
            )
        self.close()
        return None

    def close(self) -> None:
        """Gives up the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _leads(self) -> bool:
        """True if this process is the one that copies, from now on."""
        if self._lock is None:
            first = min(self._copies.values(), default=self.folder / self._index.fingerprint)
            lock = os.open(f"{first}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def _copy_all(self) -> bool:
        """Makes the missing copies; False if other processes still write some of them."""
        self.refresh()
        checksums = _checksums([self._source(file) for file in self._copies])
        # Nodes begin at different shards, to spread the load.
        first = zlib.crc32(socket.gethostname().encode()) % len(self)
        unreadable = []
        with ThreadPoolExecutor(_NUM_READS) as pool:
            for file in sorted(self.missing(), key=lambda file: (file - first) % len(self)):
                try:
                    self._copy(file, checksums.get(self._source(file)), pool)
                except _Unreadable as problem:
                    unreadable.append(str(problem))
                except BlockingIOError:  # of another data set with this shard
                    pass
        if unreadable:
            raise _Unreadable(f"{len(unreadable):,} cannot be read, {unreadable[0]} first")
        return not self.missing()

    def _copy(self, file: int, checksum: str | None, pool: ThreadPoolExecutor) -> None:
        """Copies one shard, and checks it if `dataset.json` has its checksum."""
        if self._copies[file].exists():  # another process has made it since
            self._present.add(file)
            return
        for _ in range(_ATTEMPTS):
            with suppress(_Damaged):
                self._attempt(file, checksum, pool)
                self._present.add(file)
                self.num_made += 1
                return
        raise DataError(
            "stage.wrong-checksum",
            "{path}: its checksum differs from dataset.json's; it is damaged or was replaced",
            path=self._source(file),
        )

    def _attempt(self, file: int, checksum: str | None, pool: ThreadPoolExecutor) -> None:
        name, copy = self._source(file), self._copies[file]
        with closing(_open(name)) as source:
            indexed = self._index.stamps.get(self._index.file_names[file])
            compared = slice(checksum is not None, 2)  # a checksum stands for the time alone
            if indexed and indexed[compared] != source.stamp[compared]:
                raise DataError("data.changed-since-indexed", path=name)
            self._check_room(name, source.size)
            with sole_write(copy, source.size) as part:
                if copy.exists():  # made while the source was opened
                    raise BlockingIOError
                part.truncate(source.size)  # so that its room counts as used
                if _fetch(source, part, pool) != checksum and checksum is not None:
                    raise _Damaged

    def _check_room(self, name: str, size: int) -> None:
        """_NoRoom if a copy exceeds the cap, or leaves less than a hundredth of the disk free."""
        disk = shutil.disk_usage(self.folder)
        kept_free = min(max(10**9, disk.total // 100), 50 * 10**9)
        if size + kept_free > disk.free:
            raise _NoRoom(
                f"no room for {name}: the disk has {in_words(disk.free)} free, and "
                f"{in_words(kept_free)} are kept free"
            )
        with os.scandir(self.folder) as entries:
            used = sum(map(_size, entries))
        if self._cap is not None and used + size > self._cap:
            raise _NoRoom(f"no room for {name}: {in_words(used)} of data.stage_gb are used")

    def _source(self, file: int) -> str:
        return os.path.join(self._index.root, self._index.file_names[file])


def stage_folder(text: str) -> Path:
    """The folder of `data.stage` on this node. DataError if a variable in it is not set."""
    folder = os.path.expanduser(os.path.expandvars(text))
    unset = re.search(r"\$\{?(\w+)", folder)
    if unset or not folder:
        what = f"{unset[1]} is not set" if unset else "is empty"
        raise DataError(
            "stage.folder-not-set",
            "cannot stage to {value}: {reason} on {host}",
            value=text,
            reason=what,
            host=socket.gethostname(),
        )
    return Path(folder)


def _make_own(folder: Path) -> None:
    """Creates a folder. DataError if it is another user's, or a link of theirs."""
    host = socket.gethostname()

    try:
        folder.mkdir(parents=True, exist_ok=True)
        owners = {folder.stat().st_uid, folder.lstat().st_uid}
    except OSError as error:
        raise DataError(
            "stage.unwritable",
            "{path} on {host} cannot hold copies of data: {reason}",
            path=folder,
            host=host,
            reason=error.strerror,
        ) from None
    if not owners <= {0, os.getuid()}:
        raise DataError(
            "stage.foreign-folder",
            "{path} on {host} belongs to another user, who could change the data: use a folder of "
            "your own",
            path=folder,
            host=host,
        )


def _shards(index: Index) -> list[int]:
    """Files with several samples, not those that are one: no sample begins at their first byte.

    Of a part of the data, only those with samples of this part.
    """
    is_shard = np.zeros(len(index.file_names), bool)
    is_shard[index.file] = True
    is_shard[index.file[index.offset == 0]] = False
    shards: list[int] = np.flatnonzero(is_shard).tolist()
    return shards


def _id(index: Index, file: int) -> str:
    """The name of a file's copy: another one once the file has changed."""
    name = index.file_names[file]
    path = os.path.join(real_path(index.root), name)
    stamp = index.stamps.get(name)
    state = of_content(stamp) if stamp else index.fingerprint
    return digest_of([path, state])[:32]


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # another process has completed its copy, or given it up
        return 0


def _open(name: str) -> Source:
    try:
        return open_source(name)
    except OSError as error:
        raise _Unreadable(str(error)) from None


def _fetch(source: Source, part: BinaryIO, pool: ThreadPoolExecutor) -> str:
    """Writes all bytes of a source; returns their SHA-256."""

    def block(start: int) -> bytes:
        try:
            return source.read(start, min(_BLOCK, source.size - start))
        except OSError as error:
            raise _Unreadable(str(error)) from None

    digest = hashlib.sha256()
    for content in map_ahead(pool, block, range(0, source.size, _BLOCK), most=_NUM_READS):
        part.write(content)
        digest.update(content)
    return digest.hexdigest()


def _checksums(names: list[str]) -> dict[str, str]:
    """The SHA-256 of each file that a dataset.json lists, beside it or one folder above."""
    found = dict[str, str]()
    for folder, paths in groupby(sorted(names), os.path.dirname):
        files = [os.path.basename(path) for path in paths]
        listed = shards_listed(manifest_of(folder, tuple(files)), folder, files)
        found |= {
            os.path.join(folder, file): shard.sha256
            for file, shard in listed.items()
            if shard.sha256
        }
    return found
