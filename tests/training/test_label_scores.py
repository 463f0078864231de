"""Metrics of images with lists of labels, against scikit-learn's and torch's."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score
from torch.nn import functional as F

from trainyard.training.label_scores import LabelEvaluation, LabelScores, Targets

N, C = 200, 7


def given(seed: int = 0) -> tuple[LabelScores, Targets]:
    """Rounded logits, so that many are equal; class 5 has no sample, class 6 no guess either."""
    random = np.random.default_rng(seed)
    targets = random.random((N, C)) < 0.25
    targets[:, 5:] = False
    logits = np.round(random.normal(0, 1, (N, C)) + targets, 1).astype(np.float32)
    logits[:, 6] = -1
    read = random.random(N) < 0.9
    logits[~read] = 0
    return LabelScores(read, logits.T), targets


def test_the_metrics_are_scikit_learns() -> None:
    said, targets = given()
    found = said.evaluation(targets)
    y, x = targets[said.read], said.logits.T[said.read]
    precisions = [float(average_precision_score(y[:, c], x[:, c])) for c in range(5)]
    assert found.map == pytest.approx(np.mean(precisions), rel=1e-12)
    rows = {row.label: row for row in said.per_class(targets)}
    assert [rows[c].average_precision for c in range(5)] == pytest.approx(precisions, rel=1e-12)
    assert [rows[c].samples for c in range(6)] == y[:, :6].sum(axis=0).tolist()
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert found.micro_f1 == pytest.approx(f1_score(y, x > 0, average="micro"), rel=1e-12)
    macro = f1_score(y[:, :6], x[:, :6] > 0, average="macro", zero_division=0)
    assert found.macro_f1 == pytest.approx(macro, rel=1e-12)
    loss = F.binary_cross_entropy_with_logits(torch.tensor(x), torch.tensor(y, dtype=torch.float32))
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert (found.samples, found.bad) == (said.read.sum(), N - said.read.sum())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_wrong(value: float) -> None:
    targets = np.array([[True, False], [False, True], [True, True]])
    logits = np.array([[3, -3], [-3, 3], [3, 3]], np.float32)
    assert LabelScores(np.ones(3, bool), logits.T).evaluation(targets).map == 1
    logits[0] = value
    said = LabelScores(np.ones(3, bool), logits.T)
    assert said.not_finite() == 1
    rows = {row.label: row for row in said.per_class(targets)}
    assert rows[0].average_precision == pytest.approx((1 + 2 / 3) / 2)  # missed: the last one
    assert rows[1].average_precision == pytest.approx(2 / 3)  # found, and wrongly: the first one
    assert (rows[0].hits, rows[0].guesses) == (1, 1)
    assert (rows[1].hits, rows[1].guesses) == (2, 3)


def test_without_a_readable_sample_all_is_0() -> None:
    said = LabelScores(np.zeros(2, bool), np.zeros((3, 2), np.float32))
    found = said.evaluation(np.ones((2, 3), bool))
    assert found == LabelEvaluation(samples=0, bad=2, map=0, micro_f1=0, macro_f1=0, loss=0)
