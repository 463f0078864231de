"""One training step: a batch becomes an optimizer update."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.averaging.base import Averager
from trainyard.data.batch import Batch
from trainyard.errors import RecipeError
from trainyard.monitor.meters import StepStats
from trainyard.training.buffers import Buffers
from trainyard.training.losses import Loss
from trainyard.training.precision import autocast
from trainyard.training.update import Update
from trainyard.world import World, seed_generators

Divisor = Callable[[], Tensor]
"""Gives the divisor of a loss; see Averager.divisor."""

# Messages of allocation failures other than torch's own error for a GPU: from the CPU allocator,
# the driver, cuBLAS and cuDNN, C++, and oneDNN.
_SHORTAGES = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "could not create a primitive",  # may have other causes, so the message is shown
    "could not execute a primitive",
)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward and backward passes over a batch, in micro-batches; they leave its gradient."""

    model: nn.Module  # as the averager wrapped it
    averager: Averager
    loss: Loss
    autocast: torch.dtype | None  # None for fp32
    graphs: bool  # True if the model is replayed as CUDA graphs
    seed: int
    world: World
    counts_hits: bool = True
    """False for lists of labels, which a single guess cannot meet: no sample counts as correct."""
    recomputed: Buffers | None = None
    """The model's buffers where the backward pass repeats parts of the forward pass: batch norm
    would count their samples twice."""

    def __call__(
        self,
        batch: Batch,
        step: int,
        *,
        micro: int | None,
        divisor: Divisor,
        scale: Tensor,
        is_local: bool = False,
    ) -> Tensor:
        """The sum of losses and the number of correct samples, as one tensor of two.

        `micro`: samples at a time; None for all. The gradient has the factor `scale`. With
        `is_local` it is not averaged with other ranks, and no rank waits for this one.
        """
        # Dropout is seeded by the step, so that a resumed run is alike without a saved state.
        seed_generators(_seed_of(self.seed, self.world.rank, step), batch.weights.device)
        micro_batches = batch.split(num_parts(len(batch.labels), micro))
        if self.graphs and len(micro_batches) > 1:
            _allocate_gradients(self.model)
        sums = torch.zeros(2, device=batch.weights.device)
        for micro_batch in micro_batches[:-1]:
            with self.averager.accumulating():
                sums += self._forward_backward(micro_batch, divisor, scale)
        with self.averager.accumulating() if is_local else nullcontext():
            return sums + self._forward_backward(micro_batches[-1], divisor, scale)

    def _forward_backward(self, batch: Batch, divisor: Divisor, scale: Tensor) -> Tensor:
        with autocast(batch.images_BCHW.device, self.autocast):
            logits = self.model(batch.images_BCHW)
        losses = self.loss(logits.float(), batch)
        loss_sum = (losses * batch.weights).sum()
        # A loss that is not finite makes every gradient so, with all-reduce on every rank. All
        # ranks skip the update or, where replicas differ, this one.
        seed = torch.where(loss_sum.isfinite(), scale, torch.nan)
        if self.recomputed:
            self.recomputed.remember()
        torch.autograd.backward(loss_sum / divisor(), seed)
        if self.recomputed:
            self.recomputed.restore()
        if not self.counts_hits:
            return torch.stack([loss_sum.detach(), torch.zeros_like(loss_sum)])
        guess = logits.argmax(dim=1)
        hits = batch.lam * (guess == batch.labels) + (1 - batch.lam) * (guess == batch.mixed_labels)
        return torch.stack([loss_sum.detach(), (hits * batch.weights).sum()])


@dataclass(kw_only=True)
class TrainStep:
    """One optimizer update: forward, backward, gradient averaging, optimizer step.

    A call does not synchronise with the device, except where the optimizer has no fused kernel that
    can skip non-finite updates.
    """

    passes: Passes
    buffers: Buffers  # of the model
    set_rates: Callable[[Any], None]  # sets the learning rate and the like of the schedule
    update: Update
    update_ema: Callable[[int], None]  # called with the step after each update
    micro: int | None = None
    """Samples of a forward and backward pass; None for a rank's whole share."""

    def __call__(self, batch: Batch, step: int, rates: Any) -> StepStats:
        """Update the model with one batch; its loss is the exact mean over the global batch.

        RecipeError if memory is short: a gradient that is averaged cannot be repeated by one rank.
        """
        averager = self.passes.averager
        self.set_rates(rates)
        counts = self._counts(batch)
        share = len(batch.labels) // counts.numel()
        self.buffers.remember()
        divisor = averager.divisor(counts.sum())
        with shortage_named(-(-share // num_parts(share, self.micro))):
            sums = self._sums(batch, counts, step, divisor)
            updated = self.update(step, averager.ready_parameters)
        # Without any sample the buffers are those of padding.
        self.buffers.restore_if(updated.skipped, averager.weight == 0)
        self.update_ema(step)
        return StepStats(sums[0], sums[1], counts, *updated)

    def _counts(self, batch: Batch) -> Tensor:
        """The number of samples, or several, one for each turn."""
        return batch.weights.sum()

    def _sums(self, batch: Batch, counts: Tensor, step: int, divisor: Divisor) -> Tensor:
        """The sums of Passes, which leave the gradient."""
        scale = self.update.loss_scale
        return self.passes(batch, step, micro=self.micro, divisor=divisor, scale=scale)


@contextmanager
def shortage_named(num_samples: int) -> Iterator[None]:
    """Inside, a lack of memory is an error that names what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise RecipeError(
            "memory.micro-batch-too-large",
            "out of memory with {num_samples} samples at a time: set a smaller batch.micro, such "
            "as {suggested} ({reason})",
            num_samples=num_samples,
            suggested=max(num_samples // 2, 1),
            reason=reason,
        ) from None


def is_out_of_memory(error: Exception) -> bool:
    """True if an error reports a lack of memory, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORTAGES)


def _allocate_gradients(model: nn.Module) -> None:
    """Allocates gradients up front so that backward passes accumulate into them.

    Otherwise a parameter keeps its first gradient in memory of the CUDA graph, which the next
    replay overwrites (pytorch issue 169545).
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def _seed_of(*key: int) -> int:
    """A well-mixed 64-bit seed: torch's CPU generator uses the low half only."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def num_parts(share: int, size: int | None) -> int:
    """Micro-batches of at most `size` samples that a rank's share takes; they are equal but for one
    sample, since batch norm cannot normalise a small rest."""
    return max(1, -(-share // (size or max(share, 1))))
