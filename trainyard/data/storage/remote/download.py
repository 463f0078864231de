"""Downloads whole files from a path or URL to a local disk."""

import fcntl
import hashlib
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source
from trainyard.files import fsync, is_at

_PIECE = 8 << 20  # bytes requested at once

Progress = Callable[[int], None]
"""Called with the number of bytes so far."""


def download(name: str, path: Path, progress: Progress = lambda _: None) -> str:
    """Copies a whole file from a path or URL to `path`; returns its SHA-256.

    `path` appears complete or not at all. A partial copy is kept beside it in a hidden `.download`
    file, and the next call resumes it if the origin has not changed since. Errors are those of
    `open_source` and `Source.read`; a broken transfer resumes by itself.
    """
    with closing(open_source(name)) as source:
        tag = hashlib.sha256(repr((source.name, source.stamp)).encode()).hexdigest()[:8]
        part = path.with_name(f".{path.name}.{tag}.download")
        with open(part, "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may download the same file
            digest = _fill(file, source, progress)
            file.flush()
            os.fsync(file.fileno())
            if is_at(part, file.fileno()):  # else another process has finished it
                os.replace(part, path)
    fsync(path.parent)
    return digest


def _fill(file: BinaryIO, source: Source, progress: Progress) -> str:
    digest = hashlib.sha256()
    # Without a tag of its version, an earlier part may be of another file.
    if os.fstat(file.fileno()).st_size > source.size or not source.stamp[0]:
        file.truncate(0)
    file.seek(0)
    done = 0
    while done < source.size and (content := file.read(_PIECE)):
        digest.update(content)
        done += len(content)
    while done < source.size:
        content = source.read(done, min(_PIECE, source.size - done))
        file.write(content)
        digest.update(content)
        done += len(content)
        progress(done)
    return digest.hexdigest()
