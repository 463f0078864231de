"""Checks every byte of a data set's files against checksums: dataset.json's and the format's."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainyard.data.index.build import Progress
from trainyard.data.index.overlap import Hashes, hash_names
from trainyard.data.index.table import Index
from trainyard.data.storage.manifest import Shard, is_inside
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source
from trainyard.datasets.verify.checks import Check, Counters, Finding, checked
from trainyard.datasets.verify.saved_index import hashes_of_names
from trainyard.datasets.verify.shards import Files, data_files, format_of, plain
from trainyard.errors import DataError

_PIECE = 1 << 22  # bytes read at once

Open = Callable[[str], Source]


class _Found(NamedTuple):
    """What reading a file has found."""

    findings: Sequence[Finding]
    names: Hashes = np.empty(0, np.uint64)
    """Of a list of checksums: hashes of the images' names, relative to the root."""


_Task = Callable[[Open], _Found]
"""Reads files completely. OSError or DataError if one is unreadable or damaged."""


def check_contents(files: Files, index: Index | None, work: "Work") -> list[Check]:
    """Checks SHA-256 sums in the manifest, and the format's own checksums."""
    split = files.split
    paths = [files.place.path(name) for name in data_files(files.place)]
    checks = []
    if files.of_images:
        checks += _check_images(files, index, work)
    elif files.listed:
        known = [path for path in paths if plain(path) in files.listed]
        tasks = {path: _sum_of(path, files.listed[plain(path)]) for path in known}
        found = work.run(tasks, f"checksums of {split}, MB", sum(map(_size, known)))
        about = f"SHA-256 of {_number(known)}"
        checks.append(checked(split, "checksums", about, _findings(found)))
    check_shard = getattr(format_of(files.place), "check_shard", None)
    if check_shard is not None:
        tasks = {path: _shard(path, check_shard) for path in paths}
        found = work.run(tasks, f"records of {split}, MB", sum(map(_size, paths)))
        about = f"checksums in {_number(paths)}"
        checks.append(checked(split, "records", about, _findings(found)))
    return checks


def _findings(found: Iterable[_Found]) -> list[Finding]:
    return [finding for one in found for finding in one.findings]


def _check_images(files: Files, index: Index | None, work: "Work") -> list[Check]:
    """Checks a folder of images against the lists that `data pack` makes."""
    root = f"{files.place.root}{os.sep}"
    listed = {path: shard for path, shard in files.listed.items() if path not in files.missing}
    tasks = {path: _list_of(path, shard, root) for path, shard in listed.items()}
    total = 0 if index is None else int(index.size.sum())
    found = work.run(tasks, f"checksums of {files.split}, MB", total)
    count = sum(shard.samples for shard in files.listed.values())
    about = f"SHA-256 of {count:,} images"
    checks = [checked(files.split, "checksums", about, _findings(found))]
    if index is None or files.missing:
        return checks
    known = np.concatenate([np.empty(0, np.uint64), *(one.names for one in found)])
    extra = np.flatnonzero(~np.isin(hashes_of_names(index), known)).tolist()
    others = (Finding("not listed in dataset.json", index.locate(row)[0]) for row in extra)
    about = f"{len(index):,} images"
    if extra:
        checks.append(checked(files.split, "other files", about, others, otherwise="note"))
    return checks


# --- work on one file ---


def _sum_of(path: str, shard: Shard) -> _Task:
    def check(open_file: Open) -> _Found:
        with closing(open_file(path)) as source:
            if source.size != shard.bytes:
                what = f"holds {source.size:,} bytes instead of {shard.bytes:,}"
                return _Found([Finding(what, path)])
            if _sha256(source) != shard.sha256:
                return _Found([Finding("its SHA-256 is not that of dataset.json", path)])
        return _Found([])

    return check


def _shard(path: str, check_shard: Callable[[Source], None]) -> _Task:
    def check(open_file: Open) -> _Found:
        with closing(open_file(path)) as source:
            check_shard(source)
        return _Found([])

    return check


def _list_of(path: str, shard: Shard, root: str) -> _Task:
    """Checks the images in a file of lines "SHA-256  name", as written by `sha256sum`.

    `root`: the folder of the split, with a slash at its end.
    """

    def check(open_file: Open) -> _Found:
        found = [*_sum_of(path, shard)(open_file).findings]
        if found:
            return _Found(found)
        with closing(open_file(path)) as source:
            text = os.fsdecode(source.read(0, source.size))
        # Names are relative to the parent folder of the split's.
        above = root[: root.rstrip(os.sep).rindex(os.sep) + 1]
        rows = [line.split("  ", 1) for line in text.split("\n") if line]
        for known, name in rows:
            if not is_inside(name):
                found.append(Finding("names a file outside of its folder", path))
                continue
            try:
                with closing(open_file(above + name)) as image:
                    if _sha256(image) != known:
                        found.append(Finding("its SHA-256 is not the listed one", above + name))
            except FileNotFoundError:
                found.append(Finding("listed in dataset.json, but not there", above + name))
        names = hash_names((above + name).removeprefix(root) for _, name in rows)
        return _Found(found, names)

    return check


def _sha256(source: Source) -> str:
    digest = hashlib.sha256()
    for start in range(0, source.size, _PIECE):
        digest.update(source.read(start, min(_PIECE, source.size - start)))
    return digest.hexdigest()


# --- in threads ---


@dataclass(frozen=True)
class Work:
    """How files are read: by threads."""

    workers: int
    counters: Counters

    def run(self, tasks: dict[str, _Task], what: str, total: int) -> list[_Found]:
        """The findings of all tasks, in order; `total` bytes will be read."""
        with self.counters(what, total // 10**6) as progress:
            meter = _Meter(progress)
            pool = ThreadPoolExecutor(self.workers)
            try:
                return [*pool.map(lambda task: _perform(task, meter), tasks.values())]
            finally:
                meter.stopped.set()  # so that Ctrl-C does not wait for the end of a file of 100 GB
                pool.shutdown(cancel_futures=True)


def _perform(task: _Task, meter: "_Meter") -> _Found:
    try:
        return task(lambda path: _Metered(open_source(path), meter))
    except (DataError, OSError) as error:
        return _Found([Finding(str(error))])


class _Meter:
    """Counts the bytes read by all threads."""

    def __init__(self, progress: Progress) -> None:
        self.stopped = threading.Event()
        self._progress, self._count, self._lock = progress, 0, threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count
            self._progress(self._count // 10**6)


class _Metered:
    """A source that counts its reads, and fails them once `stopped` is set."""

    def __init__(self, source: Source, meter: _Meter) -> None:
        self.name, self.size, self.stamp = source.name, source.size, source.stamp
        self._source, self._meter = source, meter

    def read(self, offset: int, size: int) -> bytes:
        if self._meter.stopped.is_set():
            raise InterruptedError("stopped")
        content = self._source.read(offset, size)
        self._meter.add(size)
        return content

    def close(self) -> None:
        self._source.close()


def _size(path: str) -> int:
    try:
        with closing(open_source(path)) as source:
            return source.size
    except OSError:
        return 0


def _number(paths: Sequence[str]) -> str:
    return f"{len(paths):,} file{'s' * (len(paths) != 1)}"
