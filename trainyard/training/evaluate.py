"""Exact evaluation: every sample counted once, on any number of ranks."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.data.batch import Batch
from trainyard.errors import InputError
from trainyard.training.label_scores import LabelScores
from trainyard.training.precision import autocast
from trainyard.training.predictions import NOWHERE, Predictions
from trainyard.world import World, total


class Views(NamedTuple):
    """The views of an image, over which probabilities are averaged."""

    flip: bool = False
    """True for each view's mirror image, too."""
    scales: tuple[float, ...] = (1.0,)
    """1.15: the middle of the image, enlarged by this factor to the size of the whole."""

    def of(self, images_BCHW: Tensor) -> Iterator[Tensor]:
        """The views, each [B, C, H, W]. InputError for a scale below 1, or none."""
        if not self.scales or not all(scale >= 1 for scale in self.scales):
            raise InputError(
                "option.out-of-range", option="scales", value=self.scales, allowed="1 or more"
            )
        for scale in self.scales:
            view_BCHW = _enlarged(images_BCHW, scale)
            yield view_BCHW
            if self.flip:
                yield view_BCHW.flip(3)


ONE_VIEW = Views()


def _enlarged(images_BCHW: Tensor, scale: float) -> Tensor:
    """The middle of images, as large as they were."""
    height, width = images_BCHW.shape[2:]
    high, wide = (max(1, round(side / scale)) for side in (height, width))
    if (high, wide) == (height, width):
        return images_BCHW
    top, left = (height - high) // 2, (width - wide) // 2
    middle_BCHW = images_BCHW[:, :, top : top + high, left : left + wide]
    return F.interpolate(middle_BCHW, (height, width), mode="bilinear")


def evaluate(
    models: Mapping[str, nn.Module],
    batches: Iterable[Batch],
    *,
    num_samples: int,
    world: World,
    device: torch.device,
    precision: torch.dtype | None = None,
    columns: Tensor | None = None,
    views: Views = ONE_VIEW,
) -> dict[str, Predictions]:
    """Predictions of each model for the samples 0 … num_samples - 1, in one pass over the data.

    `columns` are the indices of the logits to keep, in the order of the labels; None keeps all.
    The softmax is the mean over `views`. The ranks communicate once, at the end, so their shares
    may differ in size.
    """

    def judge(model: nn.Module, batch: Batch) -> Tensor:
        logits_BC, *others = _logits(model, batch, precision, columns, views=views)
        if others:  # log of the mean of all softmax
            each = [of_BC.log_softmax(dim=1) for of_BC in (logits_BC, *others)]
            logits_BC = reduce(torch.logaddexp, each) - math.log(len(each))
        return _judge(logits_BC, batch)

    rows = _filled(models, batches, judge, num_samples=num_samples, world=world, device=device)
    return {name: Predictions(*own) for name, own in zip(models, rows, strict=True)}


def score_labels(
    models: Mapping[str, nn.Module],
    batches: Iterable[Batch],
    *,
    num_samples: int,
    world: World,
    device: torch.device,
    precision: torch.dtype | None = None,
    columns: Tensor | None = None,
    views: Views = ONE_VIEW,
) -> dict[str, LabelScores]:
    """Like `evaluate`, for samples with any number of labels.

    Needs 4 bytes of the device's memory for each sample, class and model. The mean is that of the
    sigmoids.
    """

    def judge(model: nn.Module, batch: Batch) -> Tensor:
        logits_BC, *others = _logits(model, batch, precision, columns, views=views)
        if others:  # the logit of the mean of all sigmoids
            each = (logits_BC, *others)
            yes = reduce(torch.logaddexp, [F.logsigmoid(of_BC) for of_BC in each])
            no = reduce(torch.logaddexp, [F.logsigmoid(-of_BC) for of_BC in each])
            logits_BC = yes - no
        scored = torch.cat([torch.ones_like(batch.weights)[None], logits_BC.T])
        return torch.where(batch.weights > 0, scored, 0)

    rows = _filled(models, batches, judge, num_samples=num_samples, world=world, device=device)
    return {name: LabelScores(own[0] > 0, own[1:]) for name, own in zip(models, rows, strict=True)}


_ROWS = tuple(Predictions.__dataclass_fields__)


@torch.no_grad()
def _filled(
    models: Mapping[str, nn.Module],
    batches: Iterable[Batch],
    judge: Callable[[nn.Module, Batch], Tensor],
    *,
    num_samples: int,
    world: World,
    device: torch.device,
) -> NDArray[np.float32]:
    """The table [models, rows, samples] with the rows [rows, B] that `judge` gives for a batch."""
    table = torch.zeros(len(models), len(_ROWS), num_samples, device=device)
    # Each rank fills the columns of its own samples: the sum over ranks is the whole table.
    with in_eval_mode(models.values()):
        for batch in batches:
            judged = torch.stack([judge(model, batch) for model in models.values()])
            if judged.shape[1] != table.shape[1]:  # the first batch of scores
                table = torch.zeros(*judged.shape[:2], num_samples, device=device)
            table[:, :, batch.ids.to(device, non_blocking=True)] = judged
    found: NDArray[np.float32] = total(world, table).cpu().numpy()
    return found


@contextmanager
def in_eval_mode(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, models are in eval mode; then as before."""
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
    views: Views,
) -> list[Tensor]:
    """The logits of each view of the images, float32[B, C]."""
    images_BCHW, count = batch.images_BCHW, len(batch.images_BCHW)
    if not count:  # empty share of the last batch: a sharded model needs all ranks
        images_BCHW = images_BCHW.new_zeros(1, *images_BCHW.shape[1:])
    return [_forward(model, view, precision, columns)[:count] for view in views.of(images_BCHW)]


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
