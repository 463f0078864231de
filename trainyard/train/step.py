"""One optimizer update: what happens to a batch."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trainyard.averaging.base import Averager
from trainyard.train.micro import MicroBatchSize, is_out_of_memory
from trainyard.train.update import Update


class Batch(Protocol):
    """One rank's share of a global batch, on the device."""

    @property
    def images_BCHW(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def mixed_labels(self) -> Tensor: ...
    @property
    def lam(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


class MicroBatch(NamedTuple):
    """What a device takes at a time of its share of a global batch."""

    images_BCHW: Tensor
    labels: Tensor
    mixed_labels: Tensor
    lam: Tensor  # the target is `lam` of the label and 1 - `lam` of the mixed label
    weights: Tensor


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

    (But for an update by an optimizer whose kernels cannot skip by themselves; see update.py.)
    """

    model: nn.Module  # as the averager wrapped it
    averager: Averager
    loss: Callable[[Tensor, MicroBatch], Tensor]  # logits[B, C] to losses[B]
    micro: MicroBatchSize
    autocast: torch.dtype | None  # None for fp32
    set_rates: Callable[[Any], None]  # learning rate and the like, as the loop's schedule has them
    update: Update
    follow: Callable[[int], None]  # what the moving average of the weights does after an update
    seed: int
    rank: int

    def __call__(self, batch: Batch, step: int, rates: Any) -> StepStats:
        """Update the model with one batch; its loss is the exact mean over the global batch."""
        self.set_rates(rates)
        count = batch.weights.sum()
        sums = self._gradient(batch, step, self.averager.divisor(count))
        self.averager.before_update()
        updated = self.update(step)
        self.averager.after_update(step)
        self.follow(step)
        return StepStats(sums[0], sums[1], count, *updated)

    def _gradient(self, batch: Batch, step: int, divisor: Tensor) -> Tensor:
        """Leave the gradient of the whole batch in the parameters; see _forward_backward.

        If memory does not suffice the micro-batch is halved, and the batch begun anew.
        """
        while True:
            # Keyed by the step, so that a resumed run drops out alike: there is no state to save.
            torch.manual_seed(_seed_of(self.seed, self.rank, step))
            try:
                return self._accumulate(batch, divisor)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.micro.halve(len(batch.labels))
            self.update.forget()

    def _accumulate(self, batch: Batch, divisor: Tensor) -> Tensor:
        micro_batches = list(_split(batch, self.micro.size))
        sums = torch.zeros(2, device=batch.weights.device)
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else self.averager.accumulating():
                sums += self._forward_backward(micro_batch, divisor)
        return sums

    def _forward_backward(self, batch: MicroBatch, divisor: Tensor) -> Tensor:
        """Loss sum and number of correct samples, as one tensor of two."""
        with autocast(batch.images_BCHW.device, self.autocast):
            logits = self.model(batch.images_BCHW)
        losses = self.loss(logits.float(), batch)
        loss_sum = (losses * batch.weights).sum()
        # A loss that is not finite makes every gradient so, and by the averager every rank's: all
        # then skip the update together.
        seed = torch.where(loss_sum.isfinite(), self.update.loss_scale, torch.nan)
        torch.autograd.backward(loss_sum / divisor, seed)
        guess = logits.argmax(dim=1)
        hits = batch.lam * (guess == batch.labels) + (1 - batch.lam) * (guess == batch.mixed_labels)
        return torch.stack([loss_sum.detach(), (hits * batch.weights).sum()])


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision of `dtype`, or none."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _seed_of(*key: int) -> int:
    """A well-mixed 64-bit seed: torch's generator on the CPU looks at its low half only."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _split(batch: Batch, micro: int | None) -> Iterator[MicroBatch]:
    size = micro or max(len(batch.labels), 1)
    columns = (getattr(batch, name) for name in MicroBatch._fields)
    for parts in zip(*(torch.split(column, size) for column in columns), strict=True):
        yield MicroBatch(*parts)
