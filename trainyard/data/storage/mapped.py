"""Memory-mapped local files, to read samples without a copy or a system call."""

import mmap
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import core
from trainyard.data.storage.encoded import EncodedSpans
from trainyard.data.storage.source import READ_ONLY

_MOST = 4096  # files that stay mapped; each holds a descriptor
_HINTED = 64  # calls with hints after one that met a page that was not in memory

Map = mmap.mmap | bytes


class MappedFiles:
    """Memory maps kept between uses; the least recently used are dropped.

    Users hold a reference to a map, so a dropped map is unmapped once all users have finished.
    """

    def __init__(self) -> None:
        # The other half of the descriptors is for other files, staged copies for instance.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _MOST if limit == resource.RLIM_INFINITY else min(_MOST, limit // 2)
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, files: list[int], path_of: Callable[[int], str]
    ) -> tuple[list[Map], NDArray[np.int64], dict[int, str]]:
        """Maps of whole files, their lengths when mapped, and errors by file.

        A file with an error has a length of -1.
        """
        with self._lock:
            known = [self._maps.get(file) for file in files]
            for file, found in zip(files, known, strict=True):
                if found is not None:
                    self._maps.move_to_end(file)
        maps: list[Map] = []
        lengths, errors = np.full(len(files), -1), {}
        for place, (file, found) in enumerate(zip(files, known, strict=True)):
            try:
                maps.append(self._open(file, path_of(file)) if found is None else found)
                lengths[place] = len(maps[place])
            except OSError as error:
                maps.append(b"")
                errors[file] = str(error)
        return maps, lengths, errors

    def _open(self, file: int, path: str) -> Map:
        """Maps without the lock, for a slow disk: two threads may map the same file, harmlessly."""
        mapped = _map(path)
        if isinstance(mapped, bytes):
            return mapped
        with self._lock:
            self._maps[file] = mapped
            if len(self._maps) > self._most:
                self._maps.popitem(last=False)
        return mapped


def _map(path: str) -> Map:
    fd = os.open(path, READ_ONLY)
    try:
        if not os.fstat(fd).st_size:
            return b""  # an empty file cannot be mapped
        # Private: file systems in user space may refuse shared maps.
        mapped = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    mapped.madvise(mmap.MADV_RANDOM)  # whole samples are requested; see Reader.expect
    return mapped


class Readahead:
    """Asks the system to read images ahead, as long as pages are missing from memory.

    For images in memory the request is useless, and costs more than all other work on them but
    decoding.
    """

    def __init__(self) -> None:
        self._left = 0
        self._faults = _major_faults()

    def give(self, images: EncodedSpans) -> None:
        stretches = images.buffers, images.which, images.offsets, images.lengths
        core.touch(*stretches)
        faults = _major_faults()
        if faults > self._faults:
            self._faults, self._left = faults, _HINTED
        if self._left:
            self._left -= 1
            core.will_need(*stretches)


def _major_faults() -> int:
    """Number of times that threads of this process have waited for a page to be read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
