"""Exact evaluation: every sample counted once, on any number of ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.train.step import autocast
from trainyard.world import World, total


class Batch(Protocol):
    """One rank's samples, on the device."""

    @property
    def images_BCHW(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


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
    models: Mapping[str, nn.Module],
    batches: Iterable[Batch],
    *,
    world: World,
    device: torch.device,
    precision: torch.dtype | None = None,
) -> dict[str, Evaluation]:
    """Means over all ranks' batches for each model; every batch is read and decoded once.

    The ranks meet once, at the end, so shares may differ.
    """
    was_training = {name: model.training for name, model in models.items()}
    for model in models.values():
        model.eval()
    sums = torch.zeros(len(models), 5, dtype=torch.float64, device=device)
    for batch in batches:
        if len(batch.labels):
            sums += torch.stack([_sums(model, batch, precision) for model in models.values()])
    for name, model in models.items():
        model.train(was_training[name])
    found = {}
    for name, (count, bad, *means) in zip(models, total(world, sums).tolist(), strict=True):
        top1, top5, loss = (mean / max(count, 1) for mean in means)
        found[name] = Evaluation(int(count), int(bad), top1, top5, loss)
    return found


def _sums(model: nn.Module, batch: Batch, precision: torch.dtype | None) -> Tensor:
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
