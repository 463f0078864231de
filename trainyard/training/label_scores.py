"""A model's scores for images with any number of labels, and metrics from them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Targets = NDArray[np.bool_]
"""bool[samples, classes]: the labels of each sample."""


@dataclass(frozen=True)
class LabelEvaluation:
    samples: int  # samples that could be decoded
    bad: int  # samples that could not, excluded from all else
    map: float
    """Mean average precision, over the classes that have samples."""
    micro_f1: float  # of all pairs of sample and class
    macro_f1: float
    """Mean F1 of the classes, also of classes without samples that are predicted."""
    loss: float  # mean binary cross-entropy over samples and classes, without smoothing


class LabelAccuracy(NamedTuple):
    label: int
    samples: int
    guesses: int
    hits: int  # guesses that are right
    average_precision: float

    @property
    def f1(self) -> float:
        return 2 * self.hits / (self.samples + self.guesses)


@dataclass(frozen=True)
class LabelScores:
    """Columns by sample number, equal on all ranks.

    A class is predicted if its probability, the sigmoid of its logit, is above 0.5. A logit that is
    not finite counts as wrong.
    """

    read: NDArray[np.bool_]  # [samples], False for an unreadable one, whose logits are 0
    logits: NDArray[np.float32]  # [classes, samples]

    def is_read(self) -> NDArray[np.bool_]:
        return self.read

    def not_finite(self) -> int:
        """Number of samples with a logit that is not finite."""
        return int((~np.isfinite(self.logits).all(axis=0)).sum())

    def per_class(self, targets: Targets) -> list[LabelAccuracy]:
        """Metrics of each class that is a label or is predicted, the worst first.

        The average precision is that of scikit-learn, the sum over distinct scores of (R_n -
        R_{n-1}) P_n with precision P and recall R of all samples scored as high; 0 without samples.
        """
        rows = []
        for label, logits in enumerate(self.logits):
            is_own, scores = targets[self.read, label], logits[self.read]
            scores = np.where(np.isfinite(scores), scores, np.where(is_own, -np.inf, np.inf))
            is_guess = scores > 0
            samples, guesses, hits = (
                int(chosen.sum()) for chosen in (is_own, is_guess, is_own & is_guess)
            )
            if samples or guesses:
                precision = _average_precision(is_own, scores)
                rows.append(LabelAccuracy(label, samples, guesses, hits, precision))
        return sorted(rows, key=lambda row: (row.average_precision, row.f1, row.label))

    def evaluation(self, targets: Targets) -> LabelEvaluation:
        """Metrics over all classes; 0 where there is nothing to average."""
        rows, count = self.per_class(targets), int(self.read.sum())
        precisions = [row.average_precision for row in rows if row.samples]
        pairs = sum(row.samples + row.guesses for row in rows)
        return LabelEvaluation(
            samples=count,
            bad=len(self.read) - count,
            map=sum(precisions) / max(len(precisions), 1),
            micro_f1=2 * sum(row.hits for row in rows) / max(pairs, 1),
            macro_f1=sum(row.f1 for row in rows) / max(len(rows), 1),
            loss=float(self.losses(targets)[self.read].sum() / max(count, 1)),
        )

    def losses(self, targets: Targets) -> NDArray[np.float64]:
        """Mean binary cross-entropy of each sample over the classes."""
        losses = np.zeros(len(self.read))
        for label, logits in enumerate(self.logits.astype(np.float64)):
            losses += np.logaddexp(0, logits) - np.where(targets[:, label], logits, 0)
        return losses / len(self.logits)


def _average_precision(is_own: NDArray[np.bool_], scores: NDArray[np.float32]) -> float:
    order = np.argsort(-scores, kind="stable")
    hits, ordered = np.cumsum(is_own[order]), scores[order]
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # of equal scores
    gains = np.diff(hits[last], prepend=0)
    return float((gains * hits[last] / (last + 1)).sum() / max(int(hits[-1]), 1))
