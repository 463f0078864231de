"""Checks every byte of a data set's files against checksums: dataset.json's and the format's."""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from trainyard.data import formats
from trainyard.data.index.build import Progress
from trainyard.data.index.table import Index
from trainyard.data.storage.manifest import Shard
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source
from trainyard.datasets.verify.checks import Check, Counters, Finding, checked, of_error
from trainyard.datasets.verify.shards import Files
from trainyard.errors import DataError
from trainyard.printable import how_many

_PIECE = 1 << 22  # bytes read at once

_Task = Callable[[Source], Finding | None]
"""Reads a file completely; the problem with it, or None. OSError or DataError are problems too."""


def check_contents(
    files: Files, index: Index | None, workers: int, counters: Counters
) -> list[Check]:
    """Checks SHA-256 sums in the manifest, and the format's own checksums."""
    tasks: dict[str, dict[str, _Task]] = {}
    there = {path: shard for path, shard in files.listed.items() if path not in files.missing}
    if there:
        tasks["checksums"] = {path: _sum_of(path, shard) for path, shard in there.items()}
    known = formats.all_formats().get(index.format) if index else None
    if index is not None and known is not None and known.check_shard is not None:
        paths = (os.path.join(index.root, name) for name in index.file_names)
        tasks["records"] = dict.fromkeys(paths, known.check_shard)
    checks = []
    for name, of_files in tasks.items():
        total = sum(map(_size, of_files)) // 10**6
        with counters(f"{name} of {files.split}, MB", total) as progress:
            found = _run(of_files, workers, progress)
        about = f"in {how_many(len(of_files), 'file')}"
        checks.append(checked(files.split, name, about, found))
    return checks


def _sum_of(path: str, shard: Shard) -> _Task:
    def check(source: Source) -> Finding | None:
        if source.size != shard.bytes:
            what = f"holds {source.size:,} bytes instead of {shard.bytes:,}"
            return Finding("verify.wrong-size", what, path)
        digest = hashlib.sha256()
        for start in range(0, source.size, _PIECE):
            digest.update(source.read(start, min(_PIECE, source.size - start)))
        if digest.hexdigest() == shard.sha256:
            return None
        return Finding("verify.wrong-sha256", "its SHA-256 is not that of dataset.json", path)

    return check


def _size(path: str) -> int:
    try:
        with open_source(path) as source:
            return source.size
    except OSError:
        return 0


def _run(tasks: Mapping[str, _Task], workers: int, progress: Progress) -> list[Finding]:
    """The findings of all tasks, in order. The progress is in MB."""
    is_over, lock, count = threading.Event(), threading.Lock(), 0
    pool = ThreadPoolExecutor(workers)

    def note(size: int) -> None:
        nonlocal count
        if is_over.is_set():
            raise InterruptedError("stopped")
        with lock:
            count += size
            progress(count // 10**6)

    def perform(path: str) -> Finding | None:
        try:
            with open_source(path) as source:
                return tasks[path](_Metered(source, note))
        except (DataError, OSError) as error:
            return of_error(error, path)

    try:
        return [found for found in pool.map(perform, tasks) if found]
    finally:
        is_over.set()  # so that Ctrl-C does not wait for the end of a file of 100 GB
        pool.shutdown(cancel_futures=True)


class _Metered:
    """A source that announces the bytes that it reads."""

    def __init__(self, source: Source, note: Callable[[int], None]) -> None:
        self.name, self.size, self.stamp = source.name, source.size, source.stamp
        self._source, self._note, self.close = source, note, source.close

    def read(self, offset: int, size: int) -> bytes:
        self._note(size)
        return self._source.read(offset, size)
