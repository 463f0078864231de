"""One optimizer update: what happens to a batch."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trainyard.averaging.base import Averager
from trainyard.errors import RecipeError
from trainyard.monitor.clock import Stopwatch
from trainyard.training.buffers import Buffers
from trainyard.training.micro import MicroBatchSize, is_out_of_memory, reserved
from trainyard.training.precision import autocast
from trainyard.training.update import Update
from trainyard.world import World


class Samples(Protocol):
    """One rank's samples, on the device."""

    @property
    def images_BCHW(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


class Batch(Samples, Protocol):
    """One rank's share of a global batch."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def mixed_labels(self) -> Tensor: ...
    @property
    def lam(self) -> Tensor: ...


class MicroBatch(NamedTuple):
    """What a device takes at a time of its share of a global batch."""

    images_BCHW: Tensor
    labels: Tensor
    mixed_labels: Tensor
    lam: Tensor  # the target is `lam` of the label and 1 - `lam` of the mixed label
    weights: Tensor


Divisor = Callable[[], Tensor]
"""By what a loss is divided; see Averager.divisor."""
Loss = Callable[[Tensor, MicroBatch], Tensor]
"""float32 logits[B, C] and their micro-batch to losses[B]."""

_TRIALS = 3  # steps whose time is taken at once
_TRIED_S = 0.2  # and so again until this time has passed


@dataclass(frozen=True)
class StepStats:
    """Sums over a rank's samples, left on the device: to read one is to wait for the device."""

    loss_sum: Tensor
    correct: Tensor
    count: Tensor
    grad_norm: Tensor  # of the whole gradient, before clipping
    skipped: Tensor  # 1 if the update was skipped because a gradient was not finite, else 0
    update_ratio: Tensor | None  # norm of the update over that of the weights, where measured


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Forward, backward, agree, update. Calling it waits for nothing on the host.

    But for an update by an optimizer whose kernels cannot skip by themselves (see update.py), and
    for the first step of a phase, which finds out how much fits into memory.
    """

    model: nn.Module  # as the averager wrapped it
    averager: Averager
    loss: Loss
    micro: MicroBatchSize
    to_reserve: Callable[[], int]  # bytes that the update is going to allocate for good
    buffers: Buffers  # of the model
    autocast: torch.dtype | None  # None for fp32
    graphs: bool  # whether the model is replayed as CUDA graphs
    set_rates: Callable[[Any], None]  # learning rate and the like, as the loop's schedule has them
    update: Update
    follow: Callable[[int], None]  # what the moving average of the weights does after an update
    seed: int
    world: World

    def __call__(self, batch: Batch, step: int, rates: Any) -> StepStats:
        """Update the model with one batch; its loss is the exact mean over the global batch."""
        return self.timed(batch, step, rates)

    def timed(
        self,
        batch: Batch,
        step: int,
        rates: Any,
        timer: AbstractContextManager[None] | None = None,
    ) -> StepStats:
        """Like `__call__`; enters `timer` around the update, but not while waiting for others."""
        timer = timer or nullcontext()
        self.set_rates(rates)
        count = batch.weights.sum()
        self.buffers.remember()
        sums = self._gradient(batch, step, self.averager.divisor(count))
        updated = self.update(step, self.averager.ready_parameters, timer)
        # A rank with no samples left saw only padding.
        self.buffers.restore_if(torch.maximum(updated.skipped, (count == 0).float()))
        with timer:
            self.follow(step)
        return StepStats(sums[0], sums[1], count, *updated)

    def trial(self, batch: Batch, step: int) -> float | None:
        """Seconds that forward and backward take this rank alone; None if memory is short.

        To be called after the step with this batch, by any rank by itself. It leaves nothing
        behind: no gradient, no statistics of batch norm, and random numbers where they were.
        Not where a forward pass waits for other ranks.
        """
        divisor = partial(torch.clamp, batch.weights.sum(), min=1)
        self.buffers.remember()
        watch, count = Stopwatch(batch.weights.device), 0
        try:
            while watch.seconds < _TRIED_S:
                with watch:
                    for _ in range(_TRIALS):
                        self._draw_anew(step)
                        self._accumulate(batch, divisor, is_local=True)
                        self.update.forget()
                count += _TRIALS
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            self.update.forget()
            self.buffers.restore()
        return watch.seconds / count

    def _gradient(self, batch: Batch, step: int, divisor: Divisor) -> Tensor:
        """Leave the gradient of the whole batch in the parameters; see _forward_backward.

        The first step of a phase is tried before it is done: every rank by itself finds out how
        much fits, and what comes of it is dropped, so that whoever resumes there changes nothing.
        """
        if self.micro.begins(step):
            self._fit(batch, step, divisor, is_trial=True)
            self.update.forget()
            self.buffers.restore()
            self.micro.settle()
        return self._fit(batch, step, divisor, is_trial=False)

    def _fit(self, batch: Batch, step: int, divisor: Divisor, *, is_trial: bool) -> Tensor:
        """Take half as many samples at a time, and begin anew, until memory suffices.

        A rank can do so by itself but in the backward pass in which the ranks average gradients,
        which is that of the last micro-batch, and of none in a trial.
        """
        is_local = is_trial or self.world.size == 1
        while True:
            self._draw_anew(step)
            try:
                with reserved(self.to_reserve() if is_trial else 0, batch.weights.device):
                    return self._accumulate(batch, divisor, is_local)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            # Not before the error is gone, and with its frames what they held of the forward pass.
            self.update.forget()
            self.buffers.restore()
            self.micro.halve(len(batch.labels), reason)
            if not is_trial:
                self.micro.tell()

    def _draw_anew(self, step: int) -> None:
        """Keyed by the step, so that a resumed run drops out alike: there is no state to save."""
        torch.manual_seed(_seed_of(self.seed, self.world.rank, step))

    def _accumulate(self, batch: Batch, divisor: Divisor, is_local: bool) -> Tensor:
        """`is_local`: leave out that the ranks average gradients, in the last micro-batch."""
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
        """Loss sum and number of correct samples, as one tensor of two."""
        with autocast(batch.images_BCHW.device, self.autocast):
            logits = self.model(batch.images_BCHW)
        losses = self.loss(logits.float(), batch)
        loss_sum = (losses * batch.weights).sum()
        self._backward(loss_sum, divisor, len(losses), is_local=is_local)
        guess = logits.argmax(dim=1)
        hits = batch.lam * (guess == batch.labels) + (1 - batch.lam) * (guess == batch.mixed_labels)
        return torch.stack([loss_sum.detach(), (hits * batch.weights).sum()])

    def _backward(
        self, loss_sum: Tensor, divisor: Divisor, num_samples: int, *, is_local: bool
    ) -> None:
        # A loss that is not finite makes every gradient so, and by all-reduce every rank's; the
        # update is skipped, by all or, where replicas differ, by this one.
        seed = torch.where(loss_sum.isfinite(), self.update.loss_scale, torch.nan)
        try:
            torch.autograd.backward(loss_sum / divisor(), seed)
        except RuntimeError as error:
            if is_local or not is_out_of_memory(error):
                raise
            # The others wait for the rest of this gradient: by ending, this rank ends them too.
            raise RecipeError(
                f"out of memory with {num_samples} samples at a time, which had fitted before, "
                "while the ranks were averaging gradients, which one of them cannot repeat: start "
                "again with a smaller batch.micro"
            ) from None


def _allocate_gradients(model: nn.Module) -> None:
    """So that backward passes add to them.

    Otherwise a parameter keeps the first gradient as it is, in memory that belongs to the graph,
    which writes over it when it is replayed (pytorch issue 169545).
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def _seed_of(*key: int) -> int:
    """A well-mixed 64-bit seed: torch's generator on the CPU looks at its low half only."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _split(batch: Batch, micro: int | None) -> Iterator[MicroBatch]:
    size = micro or max(len(batch.labels), 1)
    columns = (getattr(batch, name) for name in MicroBatch._fields)
    for parts in zip(*(torch.split(column, size) for column in columns), strict=True):
        yield MicroBatch(*parts)
