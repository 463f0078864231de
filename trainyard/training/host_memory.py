"""Host copies of checkpoint contents, in memory that the next checkpoint reuses."""

from typing import Any

import torch
from torch import Tensor

from trainyard.averaging.sharded import whole


class HostCopies:
    """Copies nested states; GPU tensors go to page-locked memory, asynchronously.

    There is one set of copies: call `begin` only when the last set is no longer needed.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0
        self._has_gpu = False

    def begin(self) -> None:
        """Reuse the memory of the last copies."""
        del self._buffers[self._used :]
        self._used = 0

    def __call__(self, value: Any, *, keep: bool = True) -> Any:
        """Copies tensors in dicts, lists and tuples; other values are shared.

        Tensors of which each rank has a part are gathered one by one: every rank calls, and those
        that do not `keep` the copies get None.
        """
        if isinstance(value, Tensor):
            gathered = whole(value.detach())
            return self._buffer(gathered).copy_(gathered, non_blocking=True) if keep else None
        if isinstance(value, dict):
            return {key: self(each, keep=keep) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self(each, keep=keep) for each in value)
        return value

    def settle(self) -> None:
        """Wait until the GPU has made the copies."""
        if self._has_gpu:
            torch.cuda.current_stream().synchronize()

    def _buffer(self, like: Tensor) -> Tensor:
        """Memory of the same shape, dtype and strides. Reuse relies on a fixed order of tensors."""
        number, self._used = self._used, self._used + 1
        self._has_gpu = self._has_gpu or like.is_cuda
        if number < len(self._buffers):
            found = self._buffers[number]
            if (found.shape, found.dtype, found.stride()) == (
                like.shape,
                like.dtype,
                torch.empty_like(like, device="meta").stride(),
            ):
                return found
            del self._buffers[number:]
        buffer = torch.empty_like(like.detach(), device="cpu", pin_memory=like.is_cuda)
        self._buffers.append(buffer)
        return buffer
