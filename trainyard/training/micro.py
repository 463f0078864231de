"""The search for the number of samples that fit into memory at a time."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from trainyard.course import Course, Phase
from trainyard.data.batch import Batch
from trainyard.errors import RecipeError
from trainyard.training.step import TrainStep, is_out_of_memory, num_parts
from trainyard.world import gather, together

_FREE = 1 << 28  # bytes of a GPU that the search leaves to what varies from step to step


class MicroBatchSearch:
    """Sets the micro-batch size of a step, once for each phase of batch and image size.

    The size affects memory, and the result by rounding alone, with two exceptions, as everywhere:
    batch norm normalises with the statistics of a micro-batch, and the random numbers of dropout
    and drop path depend on it.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        course: Course,
        to_reserve: Callable[[], int],
        report: Callable[[str], None],
        least: int = 1,
    ) -> None:
        """`to_reserve`: bytes that the next update will allocate for good. `report` receives a
        message if not all samples fit. `least`: samples that every part needs; 2 with batch norm.
        """
        self._step, self._course, self._to_reserve = step, course, to_reserve
        self._report, self._least = report, least
        self._phase: Phase | None = None

    def __call__(self, batch: Batch, number: int) -> None:
        """Call before step `number`: searches if it is this process's first of its phase.

        Each rank halves its share until forward and backward passes fit, and the smallest size of
        all ranks is taken. What they compute is dropped. RecipeError, on all ranks, if not even
        the smallest part fits.
        """
        phase, world = self._course.phase(number), self._step.passes.world
        if phase == self._phase:
            return
        self._phase, size = phase, None
        with together(world):
            while (reason := self._shortage(batch, number, size)) is not None:
                size = _half(size, len(batch.labels), self._least, reason)
        self._step.micro = min((n for n in gather(world, size) if n is not None), default=None)
        if self._step.micro is not None:
            self._report(
                f"out of memory with more samples at a time: going on with {self._step.micro}"
            )

    def _shortage(self, batch: Batch, number: int, size: int | None) -> str | None:
        """The message of an allocation that failed; None if `size` samples at a time fit."""
        step, device = self._step, batch.weights.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        step.buffers.remember()
        try:
            # Allocated in place of what comes later, until the passes are done.
            num_bytes = self._to_reserve() + (_FREE if device.type == "cuda" else 0)
            ballast = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            step.passes(
                batch,
                number,
                micro=size,
                divisor=partial(torch.clamp, batch.weights.sum(), min=1),
                scale=step.update.loss_scale,
                is_local=True,
            )
            del ballast
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return str(error).partition("\n")[0]
        finally:
            step.update.forget()
            step.buffers.restore()
        return None


def _half(size: int | None, share: int, least: int, reason: str) -> int:
    """Half of the samples at a time, after an out-of-memory error with `size` of `share` samples.

    RecipeError if the parts would be too small.
    """
    now = min(size or share, share)
    smaller = -(-now // 2)
    if now <= 1:
        raise RecipeError(
            "memory.sample-too-large",
            "a single sample does not fit into the memory of the device: use a smaller model or "
            "data.image_size, or set model.grad_checkpointing = true ({reason})",
            reason=reason,
        )
    if share // num_parts(share, smaller) < least:
        raise RecipeError(
            "memory.samples-too-large",
            "{num_samples} samples do not fit into the memory of the device, and batch norm "
            "cannot normalise a single one: use a smaller model or data.image_size, or set "
            "model.grad_checkpointing = true ({reason})",
            num_samples=now,
            reason=reason,
        )
    return smaller


def bytes_of_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that an optimizer with two moments, as most have, allocates in its first update."""
    if optimizer.state:
        return 0
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
