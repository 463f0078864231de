"""What follows from predictions, beside plain counting."""

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
)

from trainyard.training.predictions import (
    NOWHERE,
    ClassAccuracy,
    Confusion,
    Predictions,
    class_means,
    confusions,
    pair_counts,
    per_class,
    reassessed_top1,
    suspects,
)
from trainyard.training.reliability import calibration_error, reliability, wilson

CLASSES = 7


def floats(values: object) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)


@pytest.fixture
def labels() -> NDArray[np.int32]:
    return np.random.default_rng(1).integers(0, CLASSES, 500).astype(np.int32)


@pytest.fixture
def said(labels: NDArray[np.int32]) -> Predictions:
    """Random guesses of which some are right, some of images that cannot be read, one of NaN."""
    random = np.random.default_rng(2)
    place = random.integers(0, CLASSES + 1, 500)
    guess = np.where(place == 1, labels, (labels + random.integers(1, CLASSES, 500)) % CLASSES)
    confidence = random.random(500)
    place[3], guess[3], confidence[3] = NOWHERE, -1, 0
    columns = (np.where(place == 0, 0, column) for column in (guess, confidence, place * 0.1))
    return Predictions(floats(place), *map(floats, columns))


def test_calibration_error_is_that_of_the_paper(said: Predictions) -> None:
    """Guo et al. 2017, equation 3, bin by bin."""
    read = [n for n in range(500) if said.rank_of_truth[n] > 0]
    error = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        inside = [
            n
            for n in read
            if low < said.confidence[n] <= high or (number == 0 and said.confidence[n] == 0)
        ]
        if inside:
            accuracy = sum(said.rank_of_truth[n] == 1 for n in inside) / len(inside)
            confidence = sum(float(said.confidence[n]) for n in inside) / len(inside)
            error += len(inside) / len(read) * abs(accuracy - confidence)
    assert error > 0.1
    assert calibration_error(said) == pytest.approx(error, rel=1e-12)


def test_means_over_classes_are_scikit_learns(said: Predictions, labels: NDArray[np.int32]) -> None:
    labels = np.where(labels == 5, 4, labels)  # class 5 is guessed only
    labels[labels == 6] = 9  # and 7 and 8 are neither in the data nor guessed
    read = said.is_read()
    guess = said.guess[read].astype(int)
    found = class_means(said, labels)
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        expected = balanced_accuracy_score(labels[read], guess)
    assert found.balanced_accuracy == pytest.approx(expected)
    classes = np.union1d(labels[read], guess[guess >= 0])  # a guess of nothing is no class
    f1 = f1_score(labels[read], guess, labels=classes, average="macro", zero_division=0)
    assert found.macro_f1 == pytest.approx(f1)
    nothing = Predictions(*(np.zeros(3, np.float32) for _ in range(4)))
    assert class_means(nothing, labels[:3]) == (0, 0)


def predictions(place: list[int], confidence: list[float]) -> Predictions:
    return Predictions(floats(place), floats([0] * len(place)), floats(confidence), floats(place))


def test_calibration_errors_by_hand() -> None:
    assert calibration_error(predictions([1, 1], [1.0, 1.0])) == 0
    assert calibration_error(predictions([2, 2], [1.0, 1.0])) == 1
    assert calibration_error(predictions([1, 2], [0.5, 0.5])) == 0  # in one bin
    apart = predictions([1, 2], [0.25, 0.75])
    assert calibration_error(apart) == pytest.approx(0.75)
    assert calibration_error(apart, bins=1) == 0
    assert calibration_error(predictions([0, 0], [0.0, 0.0])) == 0  # nothing could be read
    # A confidence on a border belongs to the bin below: with 0.4 it is right on average.
    assert calibration_error(predictions([1, 2], [0.5, 0.5]), bins=2) == 0
    assert calibration_error(predictions([1, 2], [0.5, 0.5000001]), bins=2) == pytest.approx(0.5)


@pytest.mark.parametrize(("hits", "count"), [(0, 9), (346, 364), (5, 5), (1, 2)])
def test_the_interval_is_scipys(hits: int, count: int) -> None:
    low, high = binomtest(hits, count).proportion_ci(0.95, "wilson")
    assert wilson(hits / count, count) == pytest.approx((low, high))


def test_bins_of_confidence_hold_every_image_once(said: Predictions) -> None:
    rows = reliability(said)
    assert sum(row.samples for row in rows) == said.is_read().sum()
    right = sum(row.samples * row.accuracy for row in rows)
    assert right == pytest.approx((said.rank_of_truth == 1).sum())
    assert all(row.low <= row.confidence <= row.high for row in rows if row.samples)
    assert wilson(0, 0) == (0, 1)


def test_metrics_per_class_are_scikit_learns(said: Predictions, labels: NDArray[np.int32]) -> None:
    read, found = said.is_read(), per_class(said, labels)
    guess, classes = said.guess[read].astype(int), range(CLASSES)
    precision, recall, f1, samples = precision_recall_fscore_support(
        labels[read], guess, labels=classes, zero_division=0
    )
    for row in sorted(found):
        n = row.label
        top5 = said.rank_of_truth[read & (labels == n)] <= 5
        expected = samples[n], (guess == n).sum(), recall[n], precision[n], f1[n], top5.mean()
        assert row[1:] == pytest.approx(expected)
    assert [row.recall for row in found] == sorted(row.recall for row in found)  # worst first
    total = sum(row.samples * row.recall for row in found) / sum(row.samples for row in found)
    assert total == pytest.approx(said.evaluation().top1)


def test_the_matrix_is_scikit_learns(said: Predictions, labels: NDArray[np.int32]) -> None:
    chosen = said.is_read() & (said.guess >= 0)
    whole = confusion_matrix(labels[chosen], said.guess[chosen].astype(int), labels=range(CLASSES))
    assert (pair_counts(said, labels, range(CLASSES))[:, :-1] == whole).all()
    part = pair_counts(said, labels, [5, 2])
    assert (part[:, :2] == whole[np.ix_([5, 2], [5, 2])]).all()
    assert (part.sum(axis=1) == whole.sum(axis=1)[[5, 2]]).all()  # the others
    rows = confusions(said, labels, with_right=True)
    assert all(whole[row.label, row.guess] == row.samples for row in rows)
    assert sum(row.samples for row in rows) == whole.sum()


def test_confusions_are_those_of_counting(said: Predictions, labels: NDArray[np.int32]) -> None:
    wrong = [n for n in range(500) if said.rank_of_truth[n] > 1 and n != 3]
    counted = Counter((int(labels[n]), int(said.guess[n])) for n in wrong)
    found = confusions(said, labels)
    assert {(row.label, row.guess): row.samples for row in found} == counted
    assert found == sorted(found, key=lambda row: (-row.samples, row.label, row.guess))
    assert confusions(said, labels, 3) == found[:3]


def test_many_classes_take_no_matrix() -> None:
    """21,841 classes squared overflow 32 bits."""
    labels = np.array([21_840, 21_840, 5], np.int32)
    said = Predictions(*map(floats, ([2, 2, 9], [21_839, 21_839, 21_840], [0.5] * 3, [1] * 3)))
    assert confusions(said, labels) == [Confusion(21_840, 21_839, 2), Confusion(5, 21_840, 1)]


def test_classes_without_a_sample_that_can_be_read_have_no_row() -> None:
    said = predictions([1, 0, 2], [0.5, 0, 0.5])
    row = ClassAccuracy(label=0, samples=2, guesses=2, recall=0.5, precision=0.5, f1=0.5, top5=1)
    assert per_class(said, np.array([0, 1, 0], np.int32)) == [row]
    nothing = predictions([0], [0])
    assert per_class(nothing, np.array([0], np.int32)) == []
    assert confusions(nothing, np.array([0], np.int32)) == []


def test_an_image_that_cannot_be_read_has_no_label() -> None:
    columns = ([1, 0, 2], [3, 0, 1], [0.5, 0, 0.5], [1, 0, 1])
    said = Predictions(*(floats(column) for column in columns))
    assert reassessed_top1(said, [[3], [0], [3]]) == (2, 0.5)
    assert reassessed_top1(said, [[], [0], []]) == (0, 0)


def test_suspects_are_unlikely_labels_the_unlikeliest_first() -> None:
    """Not those that cannot be read, are not finite, or are the best guess of an unsure model."""
    loss = [0.1, 3.0, 0.8, 0.0, np.nan, 0.69, 0.9]
    said = Predictions(
        floats([1, 2, 3, 0, NOWHERE, 2, 1]),
        floats([0, 1, 1, 0, -1, 1, 1]),
        floats([0.5] * 7),
        floats(loss),
    )
    assert suspects(said) == [1, 2]


def test_the_rank_has_its_former_name_for_a_release() -> None:
    said = Predictions(*(floats([column]) for column in range(4)))
    with pytest.warns(DeprecationWarning, match="rank_of_truth"):
        assert said.place is said.rank_of_truth
