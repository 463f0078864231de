"""A ring of batches in anonymous shared memory, between the loader process and the trainer.

The memory has no name, so it is freed once both processes have ended, however they end.
"""

import mmap
import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ALIGN = 4096  # bytes; slots begin on page borders
_SLICE = 64  # samples that a thread fills at once; a slice costs at least 0.7 ms, however short
_FILLING = 8  # batches that are filled at once, at most; above it, slices get shorter


def num_slices(count: int, threads: int) -> int:
    """Number of slices of a batch; a thread fills one at a time."""
    return max(1, -(-threads // _FILLING), min(threads, count // _SLICE))


def num_slots(batch: int, threads: int) -> int:
    """Number of slots: one at the trainer, one ready, and enough others for all threads to fill."""
    return 2 + -(-threads // num_slices(batch, threads))


class Slot(NamedTuple):
    """Arrays of one batch inside the ring, at full capacity."""

    images_BHWC: NDArray[np.uint8]
    labels: NDArray[np.int64]
    ids: NDArray[np.int64]
    visits: NDArray[np.int64]
    weights: NDArray[np.float32]


class Ring:
    """`num_slots` batches of up to `batch` images of `size` x `size`, in one block of memory."""

    def __init__(self, fd: int, *, num_slots: int, batch: int, size: int) -> None:
        self._shape = (batch, size, size, 3)
        self._stride = -(-_slot_bytes(batch, size) // _ALIGN) * _ALIGN
        length = max(num_slots * self._stride, _ALIGN)
        if os.fstat(fd).st_size != length:
            os.ftruncate(fd, length)
        self._memory = mmap.mmap(fd, length)
        self.memory = np.frombuffer(self._memory, np.uint8)
        """The whole memory, for a trainer to page-lock."""
        self.slots = [self._slot(number * self._stride) for number in range(num_slots)]

    def _slot(self, start: int) -> Slot:
        batch = self._shape[0]
        arrays: list[NDArray[np.generic]] = []
        for dtype, shape in (
            *[(np.int64, (batch,))] * 3,
            (np.float32, (batch,)),
            (np.uint8, self._shape),
        ):
            array = np.ndarray(shape, dtype, self._memory, start)
            arrays.append(array)
            start += array.nbytes
        labels, ids, visits, weights, images_BHWC = arrays
        return Slot(images_BHWC, labels, ids, visits, weights)  # type: ignore[arg-type]


def _slot_bytes(batch: int, size: int) -> int:
    return batch * (3 * 8 + 4 + size * size * 3)
