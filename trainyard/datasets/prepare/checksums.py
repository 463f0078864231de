"""MD5 sums of archives."""

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainyard.errors import DataError


def check_md5(
    expected: Mapping[Path, str],
    progress: Callable[[int], None] = lambda _: None,
    *,
    chunk_bytes: int = 8 << 20,
) -> None:
    """DataError unless the files have these MD5 sums; the files are read in parallel.

    `progress` receives the bytes read so far.
    """
    is_over, lock, count = threading.Event(), threading.Lock(), 0

    def md5(path: Path) -> str:
        nonlocal count
        digest = hashlib.md5(usedforsecurity=False)
        with open(path, "rb", buffering=0) as file:
            while (chunk := file.read(chunk_bytes)) and not is_over.is_set():
                digest.update(chunk)
                with lock:
                    count += len(chunk)
                    progress(count)
        return digest.hexdigest()

    with ThreadPoolExecutor(max(len(expected), 1)) as pool:
        try:
            found = list(pool.map(md5, expected))
        finally:
            is_over.set()  # so that Ctrl-C does not wait for the end of a file of 150 GB
    for path, digest in zip(expected, found, strict=True):
        if digest != expected[path]:
            raise DataError(
                "prepare.wrong-md5",
                path=path,
                md5=digest,
                expected=expected[path],
            )
