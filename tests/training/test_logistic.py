"""Logistic regression beside scikit-learn's, on the same standardised features."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from trainyard.training.logistic import STRENGTHS, Logistic, fit_logistic, scales

C, D, N = 4, 12, 300


def drawn(count: int = N) -> tuple[Tensor, Tensor]:
    """Features of different sizes, one of them constant, and classes that overlap."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % C
    centres_CD = torch.randn(C, D, generator=generator)
    features_ND = centres_CD[labels] + 1.5 * torch.randn(count, D, generator=generator)
    features_ND[:, 3] = 7.0
    return features_ND * torch.logspace(-0.5, 0.5, D) + 5, labels


def by_sklearn(
    features_ND: Tensor, labels: Tensor, weights_N: Tensor, strength: float
) -> LogisticRegression:
    inverse = 1 / (strength * float(weights_N.sum()))
    found = LogisticRegression(C=inverse, tol=1e-8, max_iter=10_000)
    return found.fit(features_ND.numpy(), labels.numpy(), weights_N.numpy())


def standardised(features_ND: Tensor) -> Tensor:
    features_ND = features_ND.double()
    return (features_ND - features_ND.mean(dim=0)) / scales(features_ND)


def logits(found: Logistic, features_ND: Tensor) -> Tensor:
    return features_ND.double() @ found.weight_CD.T + found.bias_C


@pytest.mark.parametrize("are_weighted", [False, True])
def test_it_is_scikit_learns(are_weighted: bool) -> None:
    """Standardisation is part of the weights: raw features give the probabilities."""
    features_ND, labels = drawn()
    weights_N = torch.where(labels == 2, 5.0, 1.0) if are_weighted else torch.ones(N)
    found = fit_logistic(features_ND, labels, weights_N, C)
    standard = standardised(features_ND)
    there = by_sklearn(standard, labels, weights_N, found.strength)
    ours = logits(found, features_ND).softmax(dim=1)
    assert np.abs(ours.numpy() - there.predict_proba(standard.numpy())).max() < 5e-3


def test_several_labels_are_a_regression_each() -> None:
    features_ND, labels = drawn()
    has_NC = torch.stack([labels == 0, labels < 2, labels % 2 == 1], dim=1)
    found = fit_logistic(features_ND, has_NC.float(), torch.ones(N), 3)
    standard = standardised(features_ND)
    ours = logits(found, features_ND).sigmoid()
    for column in range(3):
        there = by_sklearn(standard, has_NC[:, column], torch.ones(N), found.strength)
        expected = there.predict_proba(standard.numpy())[:, 1]
        assert np.abs(ours[:, column].numpy() - expected).max() < 5e-3


def test_the_strength_is_that_of_the_lowest_loss_held_out() -> None:
    features_ND, labels = drawn()
    found = fit_logistic(features_ND, labels, torch.ones(N), C)
    held = torch.arange(N) // C % 5 == 4  # every fifth of a class
    assert found.num_held_out == held.sum()
    standard = standardised(features_ND)
    losses = {}
    for strength in STRENGTHS:
        there = by_sklearn(standard[~held], labels[~held], torch.ones(int((~held).sum())), strength)
        shares = there.predict_log_proba(standard[held].numpy())
        losses[strength] = -shares[np.arange(len(shares)), labels[held].numpy()].mean()
    assert found.strength == min(losses, key=lambda each: losses[each])


def test_a_feature_that_hardly_varies_gets_no_large_weight() -> None:
    """Its own deviation as a scale made logits of thousands where it was not constant."""
    features_ND, labels = drawn()
    features_ND = standardised(features_ND).float()
    features_ND[:, 5] = 1e-6 * torch.randn(N, generator=torch.Generator().manual_seed(1))
    found = fit_logistic(features_ND, labels, torch.ones(N), C)
    other_ND = features_ND.clone()
    other_ND[:, 5] = 1.0
    assert (logits(found, other_ND) - logits(found, features_ND)).abs().max() < 0.1


def test_few_samples_hold_nothing_out() -> None:
    features_ND, labels = drawn(4 * C)
    found = fit_logistic(features_ND, labels, torch.ones(4 * C), C)
    assert (found.num_held_out, found.strength) == (0, 0.1)
    assert bool((logits(found, features_ND).argmax(dim=1) == labels).all())


def test_a_class_without_samples_is_never_said() -> None:
    features_ND, labels = drawn()
    found = fit_logistic(features_ND, labels, torch.ones(N), C + 1)
    assert logits(found, features_ND).isfinite().all()
    assert not bool((logits(found, features_ND).argmax(dim=1) == C).any())


def test_it_shows_signs_of_life() -> None:
    """A thousand classes take minutes on a CPU, and a watchdog waits for them."""
    marks = list[int]()
    features_ND, labels = drawn()
    fit_logistic(features_ND, labels, torch.ones(N), C, on_value=lambda: marks.append(1))
    assert len(marks) > len(STRENGTHS)
