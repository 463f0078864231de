"""A ring of batches in anonymous shared memory, between the loader process and the trainer.

The memory has no name, so it is freed once both processes have ended, however they end.
"""

import math
import mmap
import os
from typing import Any

import numpy as np

from trainyard.data.batch import COLUMNS, HostBatch
from trainyard.image_size import ImageSize, height_width

_PAGE = 4096  # bytes; slots begin on page borders
_SLICE = 64  # samples that a thread fills at once; a slice costs at least 0.7 ms, however short
_FILLING = 8  # batches that are filled at once, at most; above it, slices get shorter


def num_slices(count: int, threads: int) -> int:
    """Number of slices of a batch; a thread fills one at a time."""
    return max(1, -(-threads // _FILLING), min(threads, count // _SLICE))


def num_slots(batch: int, threads: int) -> int:
    """Number of slots: one at the trainer, one ready, and enough others for all threads to fill."""
    return 2 + -(-threads // num_slices(batch, threads))


class Ring:
    """`num_slots` batches of up to `batch` images of a size, in one block of memory."""

    def __init__(
        self, fd: int, *, num_slots: int, batch: int, size: ImageSize, channels: int
    ) -> None:
        self._images = (batch, *height_width(size), channels)
        columns = [(name, column.dtype, (batch,)) for name, column in COLUMNS.items()]
        self._columns = np.dtype(columns, align=True)
        stride = -(-(self._columns.itemsize + math.prod(self._images)) // _PAGE) * _PAGE
        length = max(num_slots * stride, _PAGE)
        if os.fstat(fd).st_size != length:
            os.ftruncate(fd, length)
        self._memory = mmap.mmap(fd, length)
        self.memory = np.frombuffer(self._memory, np.uint8)
        """The whole memory, for a trainer to page-lock."""
        self.slots = [self._slot(number * stride) for number in range(num_slots)]
        """The batches at full capacity."""

    def _slot(self, start: int) -> HostBatch:
        """The batch at an offset in bytes: the columns, then the images."""
        table = np.ndarray((), self._columns, self._memory, start)
        start += self._columns.itemsize
        images_BHWC = np.ndarray(self._images, np.uint8, self._memory, start)
        columns: dict[str, Any] = {name: table[name] for name in COLUMNS}
        return HostBatch(**columns, images_BHWC=images_BHWC)
