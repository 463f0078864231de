"""MD5 sums of archives, cached so that a restart does not read 150 GB again."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainyard.errors import DataError
from trainyard.files import write_text

_CHUNK = 8 << 20  # bytes


def check_md5(
    expected: Mapping[Path, str], memory: Path, progress: Callable[[int], None] = lambda _: None
) -> None:
    """DataError unless the files have these MD5 sums; the files are read in parallel.

    `memory` is a file that caches the sums; a file of the same size and time is not read again.
    `progress` receives the bytes read so far.
    """
    run = _Run(memory, progress)
    with ThreadPoolExecutor(max(len(expected), 1)) as pool:
        try:
            found = list(pool.map(run.md5, expected))
        except BaseException:
            run.is_over = True  # stops the other threads
            raise
    for path, md5 in zip(expected, found, strict=True):
        if md5 != expected[path]:
            raise DataError(
                f"{path}: its MD5 is {md5} instead of {expected[path]}: it is incomplete, damaged "
                "or another release; download it again, or take it as it is with --no-checksum"
            )


class _Run:
    def __init__(self, memory: Path, progress: Callable[[int], None]) -> None:
        self.is_over = False
        self._memory, self._progress = memory, progress
        self._known = _remembered(memory)
        self._lock = threading.Lock()
        self._bytes = 0

    def md5(self, path: Path) -> str:
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        known = self._known.get(path.name)
        if known and known[:2] == stamp:
            return str(known[2])
        md5 = self._read(path)
        with self._lock:
            self._known[path.name] = [*stamp, md5]
            write_text(self._memory, json.dumps(self._known))
        return md5

    def _read(self, path: Path) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        with open(path, "rb", buffering=0) as file:
            while (chunk := file.read(_CHUNK)) and not self.is_over:
                digest.update(chunk)
                with self._lock:
                    self._bytes += len(chunk)
                    self._progress(self._bytes)
        if self.is_over:
            raise InterruptedError(f"{path} was not read to its end")
        return digest.hexdigest()


def _remembered(memory: Path) -> dict[str, list[int | str]]:
    try:
        known: dict[str, list[int | str]] = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return known
