"""Micro-batch size: the largest that fits into memory, found by trial."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainyard.errors import RecipeError
from trainyard.world import World, gather

# Messages of allocation failures other than torch's own error for a GPU: from the CPU allocator,
# the driver, cuBLAS and cuDNN, C++, and oneDNN.
_SIGNS = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "could not create a primitive",  # may have other causes, so the message is shown
    "could not execute a primitive",
)


def num_parts(share: int, size: int | None) -> int:
    """Micro-batches of at most `size` samples that a rank's share takes; they are equal but for one
    sample, since batch norm cannot normalise a small rest."""
    return max(1, -(-share // (size or max(share, 1))))


class MicroBatchSize:
    """The current micro-batch size. It affects memory, and the result by rounding alone.

    There are two exceptions, as everywhere: batch norm normalises with the statistics of a
    micro-batch, and the random numbers of dropout and drop path depend on it.
    """

    def __init__(
        self,
        size: int | None,
        *,
        world: World,
        phase: Callable[[int], int],
        report: Callable[[str], None],
        is_tried: bool = True,
        least: int = 1,
    ) -> None:
        """`size` None takes a rank's whole share. `phase` maps a step to its phase, in which
        batches and images keep their size. `report` receives a message if a size did not fit.
        Without `is_tried` the size is fixed: no rank can repeat a step that involves all of them,
        and gradients that sharded weights have added up cannot be dropped. `least`: samples that
        every part needs; 2 with batch norm.
        """
        self.size = self._asked = size
        self._world, self._phase, self._report = world, phase, report
        self._is_tried, self._least = is_tried, least
        self._tried: set[int] = set()

    def begins(self, step: int) -> bool:
        """True if a step is this process's first of its phase; the size is then tried anew.

        The result is equal on all ranks, as they take the same steps.
        """
        phase = self._phase(step)
        if phase in self._tried or not self._is_tried:
            return False
        self._tried.add(phase)
        self.size = self._asked
        return True

    def halve(self, share: int, reason: str) -> None:
        """Halve the size after an out-of-memory error in a batch of `share` samples.

        RecipeError if the parts would be too small, and if sizes are not tried.
        """
        now = min(self.size or share, share)
        if not self._is_tried and now > 1:
            raise RecipeError(
                f"out of memory with {now} samples at a time, and ranks that communicate inside "
                f"the model cannot try fewer: set a smaller batch.micro ({reason})"
            )
        half = -(-now // 2)
        if now <= 1 or share // num_parts(share, half) < self._least:
            few = "a single sample does" if now <= 1 else f"{now} samples do"
            why = "" if now <= 1 else ", and batch norm cannot normalise a single one"
            raise RecipeError(
                f"{few} not fit into the memory of the device{why}: use a smaller model or "
                f"data.image_size, or set model.grad_checkpointing = true ({reason})"
            )
        self.size = half
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """Take the smallest size of all ranks, after the trial of a phase.

        Ranks on equal hardware differ only if memory is nearly full.
        """
        sizes = [size for size in gather(self._world, self.size) if size is not None]
        self.size = min(sizes, default=None)
        if self.size != self._asked:
            self.tell()

    def tell(self) -> None:
        self._report(f"out of memory with more samples at a time: going on with {self.size}")


@contextmanager
def reserved(num_bytes: int, device: torch.device) -> Iterator[None]:
    """Inside, `num_bytes` of memory stay allocated, in place of later allocations."""
    ballast = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    yield
    del ballast


def bytes_of_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that an optimizer with two moments, as most have, allocates in its first update."""
    if optimizer.state:
        return 0
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def is_out_of_memory(error: Exception) -> bool:
    """True if an error reports a lack of memory, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
