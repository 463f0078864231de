"""One optimizer update: what happens to a batch."""

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainyard.averaging.base import Averager


class Batch(Protocol):
    """One rank's share of a global batch, on the device."""

    @property
    def images_BCHW(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


@dataclass(frozen=True)
class StepStats:
    """Sums over a rank's samples, left on the device: to read one is to wait for the device."""

    loss_sum: Tensor
    correct: Tensor
    count: Tensor
    grad_norm: Tensor


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Forward, backward, agree, update. Calling it waits for nothing on the host."""

    model: nn.Module  # as the averager wrapped it
    optimizer: torch.optim.Optimizer
    averager: Averager
    micro: int | None  # samples of a micro-step; None for the whole share at once
    autocast: torch.dtype | None  # None for fp32
    label_smoothing: float
    clip_norm: float | None
    seed: int
    rank: int

    def __call__(self, batch: Batch, step: int, lr: float) -> StepStats:
        """Update the model with one batch; its loss is the exact mean over the global batch."""
        # Keyed by the step, so that a resumed run drops out alike: there is no state to save.
        torch.manual_seed(_seed_of(self.seed, self.rank, step))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        divisor = self.averager.divisor(batch.weights.sum())
        micro_batches = list(_split(batch, self.micro))
        sums = torch.zeros(2, device=batch.weights.device)
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else self.averager.accumulating():
                sums += self._forward_backward(*micro_batch, divisor)
        self.averager.before_update()
        grad_norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.averager.after_update(step)
        return StepStats(sums[0], sums[1], batch.weights.sum(), grad_norm)

    def _forward_backward(
        self, images_BCHW: Tensor, labels: Tensor, weights: Tensor, divisor: Tensor
    ) -> Tensor:
        """Loss sum and number of correct samples, as one tensor of two."""
        with autocast(images_BCHW.device, self.autocast):
            logits = self.model(images_BCHW)
        losses = F.cross_entropy(
            logits.float(), labels, reduction="none", label_smoothing=self.label_smoothing
        )
        loss_sum = (losses * weights).sum()
        torch.autograd.backward(loss_sum / divisor)
        correct = ((logits.argmax(dim=1) == labels) * weights).sum()
        return torch.stack([loss_sum.detach(), correct])

    def _clip(self) -> Tensor:
        """The norm of the whole gradient, which is scaled down to `clip_norm` if it is larger."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.clip_norm is not None:
            clip_grads_with_norm_(parameters, self.clip_norm, norm)
        return norm


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision of `dtype`, or none."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _seed_of(*key: int) -> int:
    """A well-mixed 64-bit seed: torch's generator on the CPU looks at its low half only."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _split(batch: Batch, micro: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    size = micro or max(len(batch.labels), 1)
    columns = (batch.images_BCHW, batch.labels, batch.weights)
    yield from zip(*(torch.split(column, size) for column in columns), strict=True)
