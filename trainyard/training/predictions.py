"""A model's predictions, one row per sample of a data set, and metrics from them.

Memory grows with the number of samples alone, not with the number of classes.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.training.label_scores import LabelScores

NOWHERE = 1 << 23
"""Rank of the true class if a logit is not finite: the sample counts as wrong."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Evaluation:
    samples: int  # samples that could be decoded
    bad: int  # samples that could not, excluded from the means
    top1: float  # fraction of 1, as top5
    top5: float
    loss: float  # mean cross-entropy, without smoothing


@dataclass(frozen=True)
class Predictions:
    """Columns by sample number, equal on all ranks."""

    rank_of_truth: Floats
    """Rank of the true class by its logit, 1 for the highest; among equal logits the lower class
    number ranks first. 0 for an unreadable sample, whose other columns are 0 too."""
    guess: Floats
    """The class of rank 1; -1 if a logit is not finite."""
    confidence: Floats
    """Softmax probability of the guess."""
    loss: Floats
    """Cross-entropy, without smoothing."""

    @property
    def place(self) -> Floats:
        """The former name of `rank_of_truth`."""
        warnings.warn("Predictions.place: say rank_of_truth", DeprecationWarning, stacklevel=2)
        return self.rank_of_truth

    def is_read(self) -> NDArray[np.bool_]:
        return self.rank_of_truth > 0

    def is_other(self) -> NDArray[np.bool_]:
        """True for the samples that are taken for another class."""
        return (self.rank_of_truth > 1) & (self.guess >= 0)

    def evaluation(self) -> Evaluation:
        rank, count = self.rank_of_truth[self.is_read()], max(int(self.is_read().sum()), 1)
        return Evaluation(
            samples=len(rank),
            bad=len(self.rank_of_truth) - len(rank),
            top1=int((rank == 1).sum()) / count,
            top5=int((rank <= 5).sum()) / count,
            loss=float(self.loss.sum(dtype=np.float64)) / count,
        )

    def not_finite(self) -> int:
        """Number of samples with a logit that is not finite."""
        return int((self.guess < 0).sum())


class ClassMeans(NamedTuple):
    """Metrics in which every class counts the same, whatever its number of samples."""

    balanced_accuracy: float
    """Mean over the classes of the share of their samples that is recognised."""
    macro_f1: float
    """Mean over the classes of F1 = 2 hits / (samples + guesses), also of classes without samples
    that are guessed."""


def class_means(predictions: Predictions, labels: NDArray[np.int32]) -> ClassMeans:
    """The means over classes, as scikit-learn's; 0 if no sample could be read.

    Counts per class alone are needed, no table of pairs of classes.
    """
    is_read = predictions.is_read()
    labels, guess = labels[is_read], predictions.guess[is_read].astype(np.int64)
    width = int(max(labels.max(initial=0), guess.max(initial=0))) + 1
    samples, guesses, hits = (
        np.bincount(chosen, minlength=width)
        for chosen in (labels, guess[guess >= 0], labels[guess == labels])
    )
    present, met = samples > 0, samples + guesses > 0
    recall, f1 = hits[present] / samples[present], 2 * hits[met] / (samples + guesses)[met]
    return ClassMeans(*(float(part.sum()) / max(len(part), 1) for part in (recall, f1)))


def summary(
    predictions: Mapping[str, Predictions | LabelScores], labels: NDArray[Any]
) -> dict[str, Any]:
    """Metrics of the weights, under "", and of other weights, with their prefixes.

    `labels` are int32[samples], or bool[samples, classes] for LabelScores. The number of samples
    appears once, as all weights were evaluated on the same ones.
    """
    metrics: dict[str, Any] = {}
    first, *_ = prefixes = sorted(predictions)  # "" before others
    for prefix in prefixes:
        scores = predictions[prefix]
        if isinstance(scores, LabelScores):
            values = asdict(scores.evaluation(labels))
        else:
            values = asdict(scores.evaluation()) | class_means(scores, labels)._asdict()
        metrics |= {
            key if key in ("samples", "bad") else f"{prefix}{key}": value
            for key, value in values.items()
            if prefix == first or key not in ("samples", "bad")
        }
    return metrics


class ClassAccuracy(NamedTuple):
    label: int
    samples: int
    guesses: int
    """Images taken for this class."""
    recall: float
    """Share of its samples that are taken for it: its top-1 accuracy."""
    precision: float
    """Share of the guesses that are right; 0 without guesses."""
    f1: float
    """2 hits / (samples + guesses)."""
    top5: float


def per_class(predictions: Predictions, labels: NDArray[np.int32]) -> list[ClassAccuracy]:
    """Metrics of each class that has samples, the worst first."""
    is_read = predictions.is_read()
    rank, labels = predictions.rank_of_truth[is_read], labels[is_read]
    guess = predictions.guess[is_read].astype(np.int64)
    width = int(max(labels.max(initial=-1), guess.max(initial=-1))) + 1
    counts, hits, top5, guesses = (
        np.bincount(chosen, minlength=width)
        for chosen in (labels, labels[rank == 1], labels[rank <= 5], guess[guess >= 0])
    )
    rows = [
        ClassAccuracy(
            label=n,
            samples=int(counts[n]),
            guesses=int(guesses[n]),
            recall=float(hits[n] / counts[n]),
            precision=float(hits[n] / max(guesses[n], 1)),
            f1=float(2 * hits[n] / (counts[n] + guesses[n])),
            top5=float(top5[n] / counts[n]),
        )
        for n in np.flatnonzero(counts).tolist()
    ]
    return sorted(rows, key=lambda row: (row.recall, row.top5, row.label))


class Confusion(NamedTuple):
    label: int
    guess: int
    samples: int


def confusions(
    predictions: Predictions,
    labels: NDArray[np.int32],
    count: int | None = None,
    *,
    with_right: bool = False,
) -> list[Confusion]:
    """Pairs of a true class and a wrongly predicted one, the most frequent first.

    `with_right`: also of a class and itself; all are then the confusion matrix, without zeros.
    """
    chosen = predictions.is_read() & (predictions.guess >= 0)
    wrong = chosen if with_right else chosen & (predictions.rank_of_truth > 1)
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


def pair_counts(
    predictions: Predictions, labels: NDArray[np.int32], classes: Sequence[int]
) -> NDArray[np.int64]:
    """int64[n, n + 1]: samples by true class and guess, of n classes and all others together."""
    count = len(classes)
    row_of = np.full(int(max(labels.max(initial=0), predictions.guess.max(initial=0))) + 1, count)
    row_of[list(classes)] = range(count)
    chosen = predictions.is_read() & (predictions.guess >= 0)
    rows, columns = row_of[labels[chosen]], row_of[predictions.guess[chosen].astype(np.int64)]
    counts = np.bincount(rows * (count + 1) + columns, minlength=(count + 1) ** 2)
    return counts.reshape(count + 1, count + 1)[:count]


def suspects(predictions: Predictions) -> list[int]:
    """Samples that may have a wrong label, the highest loss first.

    The guess is another class, and the label's probability is below 50%. It works for training
    images too (docs/learns-nothing.md has its precision and recall).
    """
    loss = predictions.loss
    chosen = np.flatnonzero(predictions.is_other() & (loss > math.log(2)))
    return [int(n) for n in chosen[np.argsort(-loss[chosen], kind="stable")]]


def reassessed_top1(predictions: Predictions, labels: Sequence[Sequence[int]]) -> tuple[int, float]:
    """Number of readable samples with labels, and the share whose guess is one of the labels.

    `labels` are all right classes of each sample: Beyer et al. 2020, "Are we done with ImageNet?".
    """
    rows = zip(labels, predictions.guess.tolist(), predictions.is_read().tolist(), strict=True)
    hits = [guess in right for right, guess, is_read in rows if right and is_read]
    return len(hits), sum(hits) / max(len(hits), 1)
