"""Staging: copies a data set to a node's own disk while training reads the source.

One process of a node makes the copies (`staged_copies.py`), and the others use each copy once it
appears; if that process dies, another continues. A copy is complete, and has the checksum that
dataset.json lists, or does not exist.
"""

import hashlib
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path

from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.data.reading.staged_copies import GROUP, CannotStage, Copies, explained
from trainyard.data.storage.ahead import map_ahead
from trainyard.data.storage.manifest import manifest_of
from trainyard.data.storage.open import open_source
from trainyard.errors import DataError

_BLOCK = 8 << 20  # bytes of a shard read at once
_NUM_READS = 8  # blocks or images in flight; hides the latency of a server
_LOOK_S = 2.0  # interval at which other processes look for new copies
_WAITS_S = (1, 4)  # before each new attempt at a file that arrived damaged


class UnreadableFile(Exception):
    """A file cannot be read now; reading its samples from the source reports it."""


def stage_folder(text: str) -> Path:
    """The folder of `data.stage` on this node. DataError if a variable in it is not set."""
    folder = os.path.expanduser(os.path.expandvars(text))
    unset = re.search(r"\$\{?(\w+)", folder)
    if unset or not folder:
        what = f"{unset[1]} is not set" if unset else "is empty"
        raise DataError(f"cannot stage to {text}: {what} on {socket.gethostname()}")
    return Path(folder)


class Stager:
    """Makes the copies of a data set on this node, or waits for the process that does."""

    def __init__(self, index: Index, folder: str, cap_gb: float | None) -> None:
        self._index = index
        self._cap = None if cap_gb is None else int(cap_gb * 1e9)
        self.folder = stage_folder(folder)
        self.copies = Copies(index, self.folder)
        self.num_made = 0
        """Copies made by this process."""

    def run(self) -> str | None:
        """Returns None once all copies exist, or the reason why no more can be made.

        DataError if a file of the source has changed or is damaged.
        """
        try:
            while self.copies.missing():
                with self.copies.leading() as leads:
                    if leads:
                        self.copies.refresh()
                        self._make_all()
                if not leads:
                    time.sleep(_LOOK_S)
                    self.copies.refresh()
        except (CannotStage, UnreadableFile, OSError) as problem:
            there = len(self.copies) - len(self.copies.missing())
            return (
                f"staging to {self.folder} on {socket.gethostname()} ends with {there:,} of "
                f"{len(self.copies):,} copies, the rest is read from the source: {problem}"
            )
        return None

    def start(self) -> "Future[str | None]":
        """Starts `run` in a thread that ends with the process."""
        done: Future[str | None] = Future()

        def work() -> None:
            try:
                done.set_result(self.run())
            except Exception as error:
                done.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return done

    def num_bytes(self) -> int:
        """Bytes of all copies when complete; asks the source for sizes of missing ones."""
        if self.copies.is_grouped:
            return int(self._index.size.sum())
        with ThreadPoolExecutor(_NUM_READS) as pool:
            return self.copies.num_bytes() + sum(pool.map(self._source_size, self.copies.missing()))

    def _source_size(self, number: int) -> int:
        with closing(open_source(self._name(number))) as source:
            return source.size

    def _name(self, number: int) -> str:
        return os.path.join(self._index.root, self._index.file_names[number])

    def _make_all(self) -> None:
        missing = self.copies.missing()
        # Nodes begin at different files, to spread the load.
        first = zlib.crc32(socket.gethostname().encode()) % len(self.copies)
        missing.sort(key=lambda number: (number - first) % len(self.copies))
        problems = []
        with ThreadPoolExecutor(_NUM_READS) as pool:
            make = self._make_group(pool) if self.copies.is_grouped else self._make_file(pool)
            for number in missing:
                try:
                    make(number)
                    self.num_made += 1
                except UnreadableFile as problem:
                    problems.append(str(problem))
        if problems:
            raise UnreadableFile(f"{len(problems):,} cannot be read, {problems[0]} first")

    def _make_group(self, pool: ThreadPoolExecutor) -> Callable[[int], None]:
        """The function that copies a group of single images; an unreadable one becomes zeros."""
        reader, sizes = Reader(self._index), self._index.size

        def make(number: int) -> None:
            first = number * GROUP
            problems = []

            def image(position: int) -> bytes:
                size = int(sizes[first + position])
                try:
                    content = reader.read_stored(first + position)
                    if len(content) == size:
                        return content
                    problems.append("images have changed since they were indexed")
                except OSError as error:
                    problems.append(str(error))
                return bytes(size)  # training reads it from the source

            lengths = sizes[first : first + GROUP].tolist()
            part = self.copies.begin(number, sum(lengths), self._cap)
            self._fetch(part, lengths, image, pool)
            if len(problems) == len(lengths):  # the source is gone, not some of its images
                part.unlink()
                raise UnreadableFile(problems[0])
            self.copies.finish(number, part)

        return make

    def _make_file(self, pool: ThreadPoolExecutor) -> Callable[[int], None]:
        """The function that copies a whole file."""
        checksums = _checksums([self._name(number) for number in range(len(self.copies))])

        def make(number: int) -> None:
            name = self._name(number)
            for wait_s in (*_WAITS_S, None):
                problem = self._attempt(number, checksums.get(name), pool)
                if problem is None:
                    return
                if wait_s is None:
                    raise DataError(f"{name}: {problem}")
                time.sleep(wait_s)

        return make

    def _attempt(self, number: int, checksum: str | None, pool: ThreadPoolExecutor) -> str | None:
        """Copies a file; returns the problem with the data received, or None."""
        try:
            source = open_source(self._name(number))
        except OSError as error:
            raise UnreadableFile(str(error)) from None
        with closing(source):
            indexed = self._index.stamps.get(self._index.file_names[number], source.stamp)
            if checksum is None and source.stamp != indexed:
                return "it has changed since it was indexed: start again, and it is indexed anew"
            lengths = [_BLOCK] * (source.size // _BLOCK) + [source.size % _BLOCK]

            def block(position: int) -> bytes:
                try:
                    return source.read(position * _BLOCK, lengths[position])
                except OSError as error:
                    raise UnreadableFile(str(error)) from None

            part = self.copies.begin(number, source.size, self._cap)
            if checksum is None and not source.stamp[0]:  # a part may be of another version
                os.truncate(part, 0)
            found = self._fetch(part, lengths, block, pool)
        if checksum not in (None, found):
            part.unlink()
            return "its checksum differs from dataset.json's; it is damaged or was replaced"
        self.copies.finish(number, part)
        return None

    def _fetch(
        self,
        part: Path,
        lengths: list[int],
        read: Callable[[int], bytes],
        pool: ThreadPoolExecutor,
    ) -> str:
        """Fills the file, continuing an earlier process's part; the SHA-256 of the whole file."""
        digest = hashlib.sha256()
        try:
            with explained(part), open(part, "rb+") as file:
                present = part.stat().st_size
                num_present = sum(end <= present for end in accumulate(lengths))
                for length in lengths[:num_present]:
                    digest.update(file.read(length))
                file.truncate(sum(lengths[:num_present]))
                rest = range(num_present, len(lengths))
                for content in map_ahead(pool, read, rest, most=_NUM_READS):
                    file.write(content)
                    digest.update(content)
                    self.copies.check_room()
                file.flush()
                os.fsync(file.fileno())
        except CannotStage:
            part.unlink(missing_ok=True)
            raise
        return digest.hexdigest()


def _checksums(names: list[str]) -> dict[str, str]:
    """The SHA-256 of each file that a dataset.json lists, beside it or one folder above."""
    found = {}
    parts = sorted(os.path.split(name) for name in names)
    for folder, group in groupby(parts, itemgetter(0)):
        files = [file for _, file in group]
        manifest = manifest_of(folder, tuple(files))
        splits = manifest.splits.values() if manifest else ()
        listed = {shard.name: shard.sha256 for split in splits for shard in split.shards}
        for file in files:
            checksum = listed.get(file) or listed.get(f"{os.path.basename(folder)}/{file}")
            if checksum:
                found[os.path.join(folder, file)] = checksum
    return found
