"""How far predictions can be trusted: intervals of shares, and accuracy by confidence."""

from math import sqrt
from typing import NamedTuple

import numpy as np

from trainyard.training.predictions import Predictions

_BINS = 15
_Z = 1.959963984540054  # of 95% of a normal distribution


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of `count` independent trials.

    Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if not count:
        return 0.0, 1.0
    square = _Z**2 / count
    centre = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * sqrt(share * (1 - share) / count + square / (4 * count))
    return max(centre - half, 0.0), min(centre + half, 1.0)


class Bin(NamedTuple):
    """Predictions with a confidence in (low, high]."""

    low: float
    high: float
    samples: int
    confidence: float
    """Their mean; 0 without samples."""
    accuracy: float


def reliability(predictions: Predictions, bins: int = _BINS) -> list[Bin]:
    """Accuracy and mean confidence in bins of equal width.

    Guo et al. 2017, "On Calibration of Modern Neural Networks".
    """
    is_read = predictions.is_read()
    confidence = predictions.confidence[is_read].astype(np.float64)
    edges = np.arange(bins + 1) / bins
    bin_of = np.digitize(confidence, edges[1:-1], right=True)
    columns = confidence, predictions.rank_of_truth[is_read] == 1
    counts = np.bincount(bin_of, minlength=bins)
    means = [np.bincount(bin_of, of, minlength=bins) / np.maximum(counts, 1) for of in columns]
    table = (edges[:-1], edges[1:], counts, *means)
    return [Bin(*row) for row in zip(*(column.tolist() for column in table), strict=True)]


def calibration_error(predictions: Predictions, bins: int = _BINS) -> float:
    """Expected calibration error: sum over bins of |bin|/n * |accuracy - mean confidence|.

    Guo et al. 2017, equation 3.
    """
    rows = reliability(predictions, bins)
    total = sum(row.samples * abs(row.accuracy - row.confidence) for row in rows)
    return float(total) / max(sum(row.samples for row in rows), 1)
