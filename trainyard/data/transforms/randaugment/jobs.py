"""Runs kernels in place on parts of a batch: cache-sized parts on a CPU, larger on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Pixels per call of a kernel: its intermediates must stay in a core's cache, and must not fill a
# GPU's memory.
_PIXELS_CPU, _PIXELS_GPU = 2**16, 2**23


class KernelCall(NamedTuple):
    kernel: Callable[..., Tensor]  # (images_nHWC, *parameters) to images_nHWC; may alter its input
    rows: NDArray[np.int64]  # [n], positions in the batch
    parameters: tuple[NDArray[Any], ...] = ()  # each [n, ...]


def run(jobs: Sequence[KernelCall], images_BHWC: Tensor) -> None:
    """Runs jobs in turn; no result returns to the host, so nothing waits for the device."""
    device = images_BHWC.device
    sent = iter(send([a for job in jobs for a in (job.rows, *job.parameters)], device))
    limit = _PIXELS_CPU if device.type == "cpu" else _PIXELS_GPU
    at_once = max(1, limit // max(1, images_BHWC.shape[1] * images_BHWC.shape[2]))
    for job in jobs:
        rows, *parameters = [next(sent) for _ in range(1 + len(job.parameters))]
        for start in range(0, len(job.rows), at_once):
            part = slice(start, start + at_once)
            given = [parameter[part] for parameter in parameters]
            if len(job.rows[part]) == 1:  # a view suffices
                row = int(job.rows[start])
                view_1HWC = images_BHWC[row : row + 1]
                view_1HWC.copy_(job.kernel(view_1HWC, *given))
            else:
                taken_nHWC = images_BHWC.index_select(0, rows[part])
                images_BHWC.index_copy_(0, rows[part], job.kernel(taken_nHWC, *given))


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies arrays to the device, in one copy that the host does not wait for."""
    contiguous = [np.ascontiguousarray(array) for array in arrays]
    *starts, end = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in contiguous)]).tolist()
    buffer = np.zeros(end, np.uint8)
    for start, array in zip(starts, contiguous, strict=True):
        buffer[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    bytes_ = torch.from_numpy(buffer)
    if device.type == "cuda":
        bytes_ = bytes_.pin_memory()
    bytes_ = bytes_.to(device, non_blocking=True)
    return [
        bytes_[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for start, array in zip(starts, contiguous, strict=True)
    ]
