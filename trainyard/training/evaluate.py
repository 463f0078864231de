"""Exact evaluation: every sample counted once, on any number of ranks."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.training.precision import autocast
from trainyard.training.predictions import NOWHERE, Predictions
from trainyard.training.step import WeightedImages
from trainyard.world import World, total


class Batch(WeightedImages, Protocol):
    """One rank's samples of a data set."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def ids(self) -> Tensor: ...


@torch.no_grad()
def evaluate(
    models: Mapping[str, nn.Module],
    batches: Iterable[Batch],
    *,
    num_samples: int,
    world: World,
    device: torch.device,
    precision: torch.dtype | None = None,
    columns: Tensor | None = None,
    flip: bool = False,
) -> dict[str, Predictions]:
    """Predictions of each model for the samples 0 … num_samples - 1, in one pass over the data.

    `columns` are the indices of the logits to keep, in the order of the labels; None keeps all.
    `flip` averages the softmax of an image and of its mirror image. The ranks communicate once, at
    the end, so their shares may differ in size.
    """
    # Each rank fills the rows of its own samples: the sum over ranks is the whole table.
    table = torch.zeros(len(models), len(_ROWS), num_samples, device=device)
    with _in_eval_mode(models.values()):
        for batch in batches:
            judged = [
                _judge(_logits(model, batch, precision, columns, flip=flip), batch)
                for model in models.values()
            ]
            table[:, :, batch.ids.to(device, non_blocking=True)] = torch.stack(judged)
    rows = total(world, table).cpu().numpy()
    return {name: Predictions(*own) for name, own in zip(models, rows, strict=True)}


_ROWS = tuple(Predictions.__dataclass_fields__)


@contextmanager
def _in_eval_mode(models: Iterable[nn.Module]) -> Iterator[None]:
    before = [(model, model.training) for model in models]
    for model, _ in before:
        model.eval()
    try:
        yield
    finally:
        for model, was_training in before:
            model.train(was_training)


def _logits(
    model: nn.Module,
    batch: Batch,
    precision: torch.dtype | None,
    columns: Tensor | None,
    *,
    flip: bool,
) -> Tensor:
    images_BCHW = batch.images_BCHW
    if not len(images_BCHW):  # empty share of the last batch: a sharded model needs all ranks
        images_BCHW = images_BCHW.new_zeros(1, *images_BCHW.shape[1:])
    logits_BC = _forward(model, images_BCHW, precision, columns)
    if flip:
        mirrored_BC = _forward(model, images_BCHW.flip(3), precision, columns)
        both = logits_BC.log_softmax(dim=1), mirrored_BC.log_softmax(dim=1)
        logits_BC = torch.logaddexp(*both) - math.log(2)  # log of the mean of both softmax
    return logits_BC[: len(batch.images_BCHW)]


def _forward(
    model: nn.Module, images_BCHW: Tensor, precision: torch.dtype | None, columns: Tensor | None
) -> Tensor:
    with autocast(images_BCHW.device, precision):
        logits_BC: Tensor = model(images_BCHW).float()
    return logits_BC if columns is None else logits_BC[:, columns]


def _judge(logits_BC: Tensor, batch: Batch) -> Tensor:
    """The rows of a table of Predictions, float32[4, B]: whole numbers below 2^24 are exact."""
    labels = batch.labels
    own = logits_BC.gather(1, labels[:, None])
    classes = torch.arange(logits_BC.shape[1], device=labels.device)
    is_before = (logits_BC > own) | ((logits_BC == own) & (classes < labels[:, None]))
    best, guess = logits_BC.max(dim=1).values, logits_BC.argmax(dim=1)
    is_finite = logits_BC.isfinite().all(dim=1)
    judged = torch.stack(
        [
            torch.where(is_finite, 1 + is_before.sum(dim=1), NOWHERE).float(),
            torch.where(is_finite, guess, -1).float(),
            torch.where(is_finite, (best - logits_BC.logsumexp(dim=1)).exp(), 0),
            F.cross_entropy(logits_BC, labels, reduction="none"),
        ]
    )
    return torch.where(batch.weights > 0, judged, 0)
