"""How many samples a device takes at a time: as many as fit, found by trying."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainyard.errors import RecipeError
from trainyard.world import World, gather

# What is said where memory is refused elsewhere than in torch's own allocator of a GPU, which has
# an error of its own: by the CPU's, by the driver, by cuBLAS and cuDNN, by C++, and by oneDNN.
_SIGNS = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "could not create a primitive",  # which may have other reasons, so they are shown
    "could not execute a primitive",
)


class MicroBatchSize:
    """The size in force. A smaller one changes the memory that a step needs, not its result.

    Two things depend on which samples are taken together, here as everywhere: the statistics by
    which batch norm normalises, and the random numbers of dropout and drop path.
    """

    def __init__(
        self,
        size: int | None,
        *,
        world: World,
        phase: Callable[[int], int],
        report: Callable[[str], None],
        is_tried: bool = True,
    ) -> None:
        """`size` None takes a rank's whole share; `phase` names the stretch of a step, in which
        batches and images keep their size; `report` is told of sizes that did not fit. One that is
        not tried is as it was asked for: no rank can repeat a step that takes all of them."""
        self.size = self._asked = size
        self._world, self._phase, self._report = world, phase, report
        self._is_tried = is_tried
        self._tried: set[int] = set()

    def begins(self, step: int) -> bool:
        """Whether a step is this process's first of its phase, which then tries the size anew.

        All ranks find the same, as they take the same steps.
        """
        phase = self._phase(step)
        if phase in self._tried or not self._is_tried:
            return False
        self._tried.add(phase)
        self.size = self._asked
        return True

    def halve(self, share: int, reason: str) -> None:
        """After an out-of-memory error in a batch of `share` samples.

        RecipeError at one sample, and where sizes are not tried.
        """
        now = min(self.size or share, share)
        if not self._is_tried and now > 1:
            raise RecipeError(
                f"out of memory with {now} samples at a time, and ranks that wait for each other "
                f"inside the model cannot try fewer: set a smaller batch.micro ({reason})"
            )
        if now <= 1:
            raise RecipeError(
                "a single sample does not fit into the memory of the device: take a smaller "
                f"model or data.image_size, or set model.grad_checkpointing = true ({reason})"
            )
        self.size = -(-now // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """After the trial of a phase: take the smallest size that a rank has come to.

        Ranks on equal hardware differ in it only where memory is all but full.
        """
        sizes = [size for size in gather(self._world, self.size) if size is not None]
        self.size = min(sizes, default=None)
        if self.size != self._asked:
            self.tell()

    def tell(self) -> None:
        self._report(f"out of memory with more samples at a time: going on with {self.size}")


@contextmanager
def reserved(num_bytes: int, device: torch.device) -> Iterator[None]:
    """Keep memory free for what is yet to be allocated."""
    ballast = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    yield
    del ballast


def bytes_of_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer with two moments, as most have, allocates in its first update."""
    if optimizer.state:
        return 0
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there was no memory, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
