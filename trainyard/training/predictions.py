"""What a model says of each sample of a data set, and what follows from it.

One row per sample, so memory grows with the samples alone, however many classes there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NOWHERE = 1 << 23
"""The place of the true class among logits that are not all finite: the sample counts as wrong."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Evaluation:
    samples: int  # that could be decoded
    bad: int  # that could not, and are in none of the means
    top1: float  # fractions of 1
    top5: float
    loss: float  # mean cross-entropy, without smoothing

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Predictions:
    """Columns by sample number, equal on all ranks."""

    place: Floats
    """Of the true class by its logit, 1 for the best; of equal logits the lower class number comes
    first. 0 if the sample could not be read, and then so is all else."""
    guess: Floats
    """The class at place 1; -1 where a logit is not finite."""
    confidence: Floats
    """The softmax probability of the guess."""
    loss: Floats
    """Cross-entropy, without smoothing."""

    def is_read(self) -> NDArray[np.bool_]:
        return self.place > 0

    def evaluation(self) -> Evaluation:
        place, count = self.place[self.is_read()], max(int(self.is_read().sum()), 1)
        return Evaluation(
            samples=len(place),
            bad=len(self.place) - len(place),
            top1=int((place == 1).sum()) / count,
            top5=int((place <= 5).sum()) / count,
            loss=float(self.loss.sum(dtype=np.float64)) / count,
        )

    def not_finite(self) -> int:
        """How many samples gave a logit that is not finite."""
        return int((self.guess < 0).sum())


def summary(predictions: Mapping[str, Predictions]) -> dict[str, Any]:
    """What is said of the weights, under "", and of others, under prefixes of their own.

    All read the same samples, so how many is said once.
    """
    found = predictions[""].evaluation().as_dict()
    for prefix in predictions.keys() - {""}:
        other = predictions[prefix].evaluation()
        found |= {f"{prefix}{key}": getattr(other, key) for key in ("top1", "top5", "loss")}
    return found


def calibration_error(predictions: Predictions, bins: int = 15) -> float:
    """Expected calibration error: sum over bins of |bin|/n * |accuracy - mean confidence|.

    Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3: the bins of the
    confidence are equally wide, ((m - 1) / bins, m / bins].
    """
    is_read = predictions.is_read()
    confidence = predictions.confidence[is_read].astype(np.float64)
    gap = (predictions.place[is_read] == 1) - confidence
    inner = np.arange(1, bins) / bins
    sums = np.bincount(np.digitize(confidence, inner, right=True), gap, minlength=bins)
    return float(np.abs(sums).sum() / max(len(gap), 1))


class ClassAccuracy(NamedTuple):
    label: int
    samples: int
    top1: float
    top5: float


def per_class(predictions: Predictions, labels: NDArray[np.int32]) -> list[ClassAccuracy]:
    """The accuracy on the samples of each class that has some; the worst first."""
    is_read = predictions.is_read()
    place, labels = predictions.place[is_read], labels[is_read]
    counts, top1, top5 = (
        np.bincount(labels[chosen], minlength=int(labels.max(initial=-1)) + 1)
        for chosen in (place > 0, place == 1, place <= 5)
    )
    rows = [
        ClassAccuracy(n, int(counts[n]), float(top1[n] / counts[n]), float(top5[n] / counts[n]))
        for n in np.flatnonzero(counts).tolist()
    ]
    return sorted(rows, key=lambda row: (row.top1, row.top5, row.label))


class Confusion(NamedTuple):
    label: int
    guess: int
    samples: int


def confusions(
    predictions: Predictions, labels: NDArray[np.int32], count: int | None = None
) -> list[Confusion]:
    """The pairs of a class and what it is wrongly taken for, the most frequent first."""
    wrong = (predictions.place > 1) & (predictions.guess >= 0)
    base = int(max(labels.max(initial=0), predictions.guess.max(initial=0))) + 1
    pairs, counts = np.unique(
        labels[wrong].astype(np.int64) * base + predictions.guess[wrong].astype(np.int64),
        return_counts=True,
    )
    order = np.argsort(-counts, kind="stable")[:count]
    return [
        Confusion(*divmod(int(pair), base), samples)
        for pair, samples in zip(pairs[order], counts[order].tolist(), strict=True)
    ]


def reassessed_top1(predictions: Predictions, labels: Sequence[Sequence[int]]) -> tuple[int, float]:
    """How many samples that could be read have labels, and of how many the guess is one of them.

    `labels` are all right classes of each sample: Beyer et al. 2020, "Are we done with ImageNet?".
    """
    rows = zip(labels, predictions.guess.tolist(), predictions.is_read().tolist(), strict=True)
    hits = [guess in right for right, guess, is_read in rows if right and is_read]
    return len(hits), sum(hits) / max(len(hits), 1)
