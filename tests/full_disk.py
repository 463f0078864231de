"""A disk that is full, for one process, without root."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Inside, a file of this process that grows beyond `size` bytes fails ("File too large").

    As on a full disk, a write may be cut short before. Nothing may be printed meanwhile: that goes
    to a file too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
