"""One training step: a batch becomes an optimizer update."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trainyard.averaging.base import Averager
from trainyard.errors import RecipeError
from trainyard.training.buffers import Buffers
from trainyard.training.micro import MicroBatchSize, is_out_of_memory, num_parts, reserved
from trainyard.training.precision import autocast
from trainyard.training.update import Update
from trainyard.world import World, seed_generators


class WeightedImages(Protocol):
    """One rank's images and their weights[B], on the device."""

    @property
    def images_BCHW(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


class Batch(WeightedImages, Protocol):
    """One rank's share of a global batch."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def mixed_labels(self) -> Tensor: ...
    @property
    def lam(self) -> Tensor: ...


class MicroBatch(NamedTuple):
    """The samples of one forward and backward pass."""

    images_BCHW: Tensor
    labels: Tensor
    mixed_labels: Tensor
    lam: Tensor  # the target is `lam` of the label and 1 - `lam` of the mixed label
    weights: Tensor


Divisor = Callable[[], Tensor]
"""Gives the divisor of a loss; see Averager.divisor."""
Loss = Callable[[Tensor, MicroBatch], Tensor]
"""Gives losses[B] for float32 logits[B, C] and their micro-batch."""


@dataclass(frozen=True)
class StepStats:
    """Sums over a rank's samples, on the device: reading one waits for the device."""

    loss_sum: Tensor
    correct: Tensor
    count: Tensor
    grad_norm: Tensor  # of the whole gradient, before clipping
    skipped: Tensor  # 1 if the update was skipped because a gradient was not finite, else 0


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """One optimizer update: forward, backward, gradient averaging, optimizer step.

    A call does not synchronise with the device, except where (1) the optimizer has no fused kernel
    that can skip non-finite updates, or (2) the step is the first of a phase and searches for the
    micro-batch size.
    """

    model: nn.Module  # as the averager wrapped it
    averager: Averager
    loss: Loss
    micro: MicroBatchSize
    to_reserve: Callable[[], int]  # bytes that the first update will allocate for good
    buffers: Buffers  # of the model
    autocast: torch.dtype | None  # None for fp32
    graphs: bool  # True if the model is replayed as CUDA graphs
    set_rates: Callable[[Any], None]  # sets the learning rate and the like of the schedule
    update: Update
    update_ema: Callable[[int], None]  # called with the step after each update
    seed: int
    world: World
    counts_hits: bool = True
    """False for lists of labels, which a single guess cannot meet: no sample counts as correct."""

    def __call__(self, batch: Batch, step: int, rates: Any) -> StepStats:
        """Update the model with one batch; its loss is the exact mean over the global batch."""
        self.set_rates(rates)
        count = batch.weights.sum()
        self.buffers.remember()
        sums = self._gradient(batch, step, self.averager.divisor(count))
        updated = self.update(step, self.averager.ready_parameters)
        # A rank with no samples left saw only padding.
        self.buffers.restore_if(torch.maximum(updated.skipped, (count == 0).float()))
        self.update_ema(step)
        return StepStats(sums[0], sums[1], count, *updated)

    def _gradient(self, batch: Batch, step: int, divisor: Divisor) -> Tensor:
        """Leaves the gradient of the whole batch in the parameters; see _forward_backward.

        The first step of a phase starts with a trial: every rank by itself finds a micro-batch size
        that fits. The trial's results are dropped, so a run that resumes there changes nothing.
        """
        if self.micro.begins(step):
            self._fit(batch, step, divisor, is_trial=True)
            self.update.forget()
            self.buffers.restore()
            self.micro.settle()
        return self._fit(batch, step, divisor, is_trial=False)

    def _fit(self, batch: Batch, step: int, divisor: Divisor, *, is_trial: bool) -> Tensor:
        """Halves the micro-batch and starts again until memory suffices.

        A rank can do so by itself, except in the backward pass that averages gradients with other
        ranks: the last micro-batch's. A trial has no such pass.
        """
        is_local = is_trial or self.world.size == 1
        while True:
            self._draw_anew(step, batch.weights.device)
            try:
                with reserved(self.to_reserve() if is_trial else 0, batch.weights.device):
                    return self._accumulate(batch, divisor, is_local)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            # Outside of `except`: the error's frames hold tensors of the forward pass.
            self.update.forget()
            self.buffers.restore()
            self.micro.halve(len(batch.labels), reason)
            if not is_trial:
                self.micro.tell()

    def _draw_anew(self, step: int, device: torch.device) -> None:
        """Seeds dropout by the step, so that a resumed run is alike without a saved state."""
        seed_generators(_seed_of(self.seed, self.world.rank, step), device)

    def _accumulate(self, batch: Batch, divisor: Divisor, is_local: bool) -> Tensor:
        """`is_local`: the last micro-batch does not average gradients either."""
        micro_batches = list(_split(batch, self.micro.size))
        if self.graphs and len(micro_batches) > 1:
            _allocate_gradients(self.model)
        sums = torch.zeros(2, device=batch.weights.device)
        for micro_batch in micro_batches[:-1]:
            with self.averager.accumulating():
                sums += self._forward_backward(micro_batch, divisor, is_local=True)
        with self.averager.accumulating() if is_local else nullcontext():
            return sums + self._forward_backward(micro_batches[-1], divisor, is_local=is_local)

    def _forward_backward(self, batch: MicroBatch, divisor: Divisor, *, is_local: bool) -> Tensor:
        """The sum of losses and the number of correct samples, as one tensor of two."""
        with autocast(batch.images_BCHW.device, self.autocast):
            logits = self.model(batch.images_BCHW)
        losses = self.loss(logits.float(), batch)
        loss_sum = (losses * batch.weights).sum()
        self._backward(loss_sum, divisor, len(losses), is_local=is_local)
        if not self.counts_hits:
            return torch.stack([loss_sum.detach(), torch.zeros_like(loss_sum)])
        guess = logits.argmax(dim=1)
        hits = batch.lam * (guess == batch.labels) + (1 - batch.lam) * (guess == batch.mixed_labels)
        return torch.stack([loss_sum.detach(), (hits * batch.weights).sum()])

    def _backward(
        self, loss_sum: Tensor, divisor: Divisor, num_samples: int, *, is_local: bool
    ) -> None:
        # A loss that is not finite makes every gradient so, with all-reduce on every rank. All
        # ranks skip the update or, where replicas differ, this one.
        seed = torch.where(loss_sum.isfinite(), self.update.loss_scale, torch.nan)
        try:
            torch.autograd.backward(loss_sum / divisor(), seed)
        except RuntimeError as error:
            if is_local or not is_out_of_memory(error):
                raise
            # The other ranks wait for the rest of this gradient; the end of this rank ends them.
            raise RecipeError(
                f"out of memory with {num_samples} samples at a time, which fitted before, during "
                "gradient averaging, which one rank cannot repeat: restart with a smaller "
                "batch.micro"
            ) from None


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


def _split(batch: Batch, micro: int | None) -> Iterator[MicroBatch]:
    count = num_parts(len(batch.labels), micro)
    columns = (getattr(batch, name) for name in MicroBatch._fields)
    for parts in zip(*(torch.tensor_split(column, count) for column in columns), strict=True):
        yield MicroBatch(*parts)
