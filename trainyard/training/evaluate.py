"""Exact evaluation: every sample counted once, on any number of ranks."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
                "option.out-of-range",
                "{option} {value}: choose {allowed}",
                option="scales",
                value=self.scales,
                allowed="1 or more",
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


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates models on the samples 0 … num_samples - 1, in one pass over the data.

    The ranks communicate once, at the end, so their shares may differ in size.
    """

    num_samples: int
    world: World
    device: torch.device
    precision: torch.dtype | None = None
    columns: Tensor | None = None
    """Indices of the logits to keep, in the order of the labels; None keeps all."""
    views: Views = ONE_VIEW

    def predictions(
        self, models: Mapping[str, nn.Module], batches: Iterable[Batch]
    ) -> dict[str, Predictions]:
        """Predictions of each model; the softmax is the mean over the views."""
        rows = self._table(models, batches, _predicted)
        return {name: Predictions(*columns) for name, columns in zip(models, rows, strict=True)}

    def label_scores(
        self, models: Mapping[str, nn.Module], batches: Iterable[Batch]
    ) -> dict[str, LabelScores]:
        """Scores of each model, for samples with any number of labels.

        Needs 4 bytes of the device's memory for each sample, class and model. The mean over the
        views is that of the sigmoids.
        """
        rows = self._table(models, batches, _scored)
        return {
            name: LabelScores(columns[0] > 0, columns[1:])
            for name, columns in zip(models, rows, strict=True)
        }

    @torch.no_grad()
    def _table(
        self,
        models: Mapping[str, nn.Module],
        batches: Iterable[Batch],
        rows_of: Callable[[list[Tensor], Batch], Tensor],
    ) -> NDArray[np.float32]:
        """Table [models, rows, samples]; `rows_of` makes [rows, B] of the logits of each view."""
        table = torch.zeros(len(models), len(_ROWS), self.num_samples, device=self.device)
        # Each rank fills the columns of its own samples: the sum over ranks is the whole table.
        with in_eval_mode(models.values()):
            for batch in batches:
                each = [rows_of(self._logits(model, batch), batch) for model in models.values()]
                rows = torch.stack(each)
                if rows.shape[1] != table.shape[1]:  # the first batch of scores
                    table = torch.zeros(*rows.shape[:2], self.num_samples, device=self.device)
                table[:, :, batch.ids.to(self.device, non_blocking=True)] = rows
        filled: NDArray[np.float32] = total(self.world, table).cpu().numpy()
        return filled

    def _logits(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        """The logits of each view of the images, float32[B, C]."""
        images_BCHW, count = batch.images_BCHW, len(batch.images_BCHW)
        if not count:  # empty share of the last batch: a sharded model needs all ranks
            images_BCHW = images_BCHW.new_zeros(1, *images_BCHW.shape[1:])
        views = []
        for view_BCHW in self.views.of(images_BCHW):
            with autocast(view_BCHW.device, self.precision):
                logits_BC = model(view_BCHW).float()[:count]
            views.append(logits_BC if self.columns is None else logits_BC[:, self.columns])
        return views


_ROWS = tuple(Predictions.__dataclass_fields__)


def _predicted(views: list[Tensor], batch: Batch) -> Tensor:
    """The rows of a table of Predictions, float32[4, B]: whole numbers below 2^24 are exact."""
    logits_BC = mean_logits(views, has_lists=False)
    return torch.where(batch.weights > 0, _rows(logits_BC, batch.labels), 0)


def mean_logits(each: Sequence[Tensor], *, has_lists: bool) -> Tensor:
    """Logits of the mean of the softmax, or sigmoids, of several logits, float32[B, C]."""
    if len(each) == 1:
        return each[0]
    if has_lists:
        yes = reduce(torch.logaddexp, [F.logsigmoid(logits_BC) for logits_BC in each])
        return yes - reduce(torch.logaddexp, [F.logsigmoid(-logits_BC) for logits_BC in each])
    logs = [logits_BC.log_softmax(dim=1) for logits_BC in each]
    return reduce(torch.logaddexp, logs) - math.log(len(logs))


def predictions_of(scores: LabelScores, labels: Tensor, temperature: float) -> Predictions:
    """Predictions by the softmax of logits over a temperature. `labels`: int64[samples]."""
    rows = _rows(torch.from_numpy(scores.logits).T / temperature, labels)
    return Predictions(*torch.where(torch.from_numpy(scores.read), rows, 0).numpy())


def _rows(logits_BC: Tensor, labels: Tensor) -> Tensor:
    truth = logits_BC.gather(1, labels[:, None])
    classes = torch.arange(logits_BC.shape[1], device=labels.device)
    is_before = (logits_BC > truth) | ((logits_BC == truth) & (classes < labels[:, None]))
    best, guess = logits_BC.max(dim=1).values, logits_BC.argmax(dim=1)
    is_finite = logits_BC.isfinite().all(dim=1)
    return torch.stack(
        [
            torch.where(is_finite, 1 + is_before.sum(dim=1), NOWHERE).float(),
            torch.where(is_finite, guess, -1).float(),
            torch.where(is_finite, (best - logits_BC.logsumexp(dim=1)).exp(), 0),
            F.cross_entropy(logits_BC, labels, reduction="none"),
        ]
    )


def _scored(views: list[Tensor], batch: Batch) -> Tensor:
    """The rows of a table of LabelScores, float32[1 + C, B]."""
    logits_BC = mean_logits(views, has_lists=True)
    rows = torch.cat([torch.ones_like(batch.weights)[None], logits_BC.T])
    return torch.where(batch.weights > 0, rows, 0)


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
