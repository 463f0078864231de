"""Files of this machine mapped into memory, so that a sample is read without a copy or a call."""

import mmap
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import core
from trainyard.data.source import READ_ONLY
from trainyard.data.stored import Stored

_MOST = 4096  # files that stay mapped; each takes a descriptor
_HINTED = 64  # calls after one that met a page that was not in memory

Map = mmap.mmap | bytes


class MappedFiles:
    """Maps that stay between uses, but for those not used for long.

    Who uses one holds it by a reference, so that one that is dropped here goes when all are done.
    """

    def __init__(self) -> None:
        # What else is open, staged copies say, has the other half.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _MOST if limit == resource.RLIM_INFINITY else min(_MOST, limit // 2)
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, files: list[int], path_of: Callable[[int], str]
    ) -> tuple[list[Map], NDArray[np.int64], dict[int, str]]:
        """Files mapped whole, their lengths when they were, and what is wrong with the others.

        Those have a length of -1.
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
        """Outside the lock, for a slow disk: two threads may map the same file, to no harm."""
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
            return b""  # which cannot be mapped
        # Private: file systems in user space may refuse shared maps.
        mapped = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    mapped.madvise(mmap.MADV_RANDOM)  # whole samples are asked for; see Reader.expect
    return mapped


class Hints:
    """Asks the system to read what is wanted soon, as long as there is anything to read.

    Of images that are in memory already it would be no help, and cost more than all else that is
    done for them but decoding.
    """

    def __init__(self) -> None:
        self._left = 0
        self._faults = _major_faults()

    def give(self, images: Stored) -> None:
        stretches = images.buffers, images.which, images.offsets, images.lengths
        core.touch(*stretches)
        faults = _major_faults()
        if faults > self._faults:
            self._faults, self._left = faults, _HINTED
        if self._left:
            self._left -= 1
            core.will_need(*stretches)


def _major_faults() -> int:
    """How often a thread of this process has waited for a page to be read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
