"""How many samples a device takes at a time: as many as fit, found by trying."""

from collections.abc import Callable

import torch

from trainyard.errors import RecipeError


class MicroBatchSize:
    """The size in force. Smaller ones change the memory that a step needs, not its result."""

    def __init__(self, size: int | None, *, report: Callable[[str], None]) -> None:
        """`size` None takes a rank's whole share; `report` is told of each halving."""
        self.size = size
        self._report = report

    def halve(self, share: int) -> None:
        """After an out-of-memory error in a batch of `share` samples. RecipeError at one sample."""
        now = min(self.size or share, share)
        if now <= 1:
            raise RecipeError(
                "a single sample does not fit into the memory of the device: take a smaller "
                "model or data.image_size, or set model.grad_checkpointing = true"
            ) from None
        self.size = -(-now // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._report(f"out of memory with {now} samples at a time; going on with {self.size}")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch found no memory, on a GPU or (a plain RuntimeError) on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
