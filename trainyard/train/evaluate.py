"""Exact evaluation: every sample counted once, on any number of ranks."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trainyard.train.step import Batch, autocast
from trainyard.world import World, total


@dataclass(frozen=True)
class Evaluation:
    samples: int  # that could be decoded
    bad: int  # that could not, and are in none of the means
    top1: float  # fractions of 1
    top5: float
    loss: float  # mean cross-entropy, without smoothing

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    world: World,
    device: torch.device,
    precision: torch.dtype | None = None,
) -> Evaluation:
    """Means over all ranks' batches. The ranks meet once, at the end, so shares may differ."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    for batch in batches:
        if len(batch.labels):
            sums += _batch_sums(model, batch, precision)
    model.train(was_training)
    count, bad, top1, top5, loss = total(world, sums).tolist()
    mean = 1 / max(count, 1)
    return Evaluation(int(count), int(bad), top1 * mean, top5 * mean, loss * mean)


def _batch_sums(model: nn.Module, batch: Batch, precision: torch.dtype | None) -> torch.Tensor:
    with autocast(batch.labels.device, precision):
        logits = model(batch.images_BCHW).float()
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = best == batch.labels[:, None]
    columns = (
        torch.ones_like(losses),
        hits[:, 0],
        hits.any(dim=1),
        losses,
    )
    good, top1, top5, loss = ((column * batch.weights).double().sum() for column in columns)
    return torch.stack([good, len(losses) - good, top1, top5, loss])
