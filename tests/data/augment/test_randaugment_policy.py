"""The notation, and what is drawn from it, against timm's."""

import random
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from timm.data import auto_augment

from trainyard.data.augment.policy import DrawnOperations, Policy, check_policy, draw, parse_policy

NOTATIONS = [
    "rand",
    "rand-m9-mstd0.5-inc1",
    "rand-m15-n2",
    "rand-m7-n3-p0.3-mstd101",
    "rand-m15-mmax15-mstd0.5-inc1",
    "rand-n4-tweights-m6",
    "rand-m9-t3a-inc1",
    "rand-n5-t3aw",
    "3a",
    "3a-mstd0.5",
]


def timms(text: str) -> Any:
    hparams = {"translate_const": 100, "img_mean": (124, 116, 104)}
    if text.startswith("rand"):
        return auto_augment.rand_augment_transform(text, hparams)
    return auto_augment.auto_augment_transform(text, hparams)


@pytest.mark.parametrize("text", NOTATIONS)
def test_the_notation_is_timms(text: str) -> None:
    policy, theirs = parse_policy(text), timms(text)
    assert check_policy(text) == text
    if text.startswith("rand"):
        ops = theirs.ops
        assert policy.layers == theirs.num_layers
        if theirs.choice_weights is None:
            assert policy.weights is None
        else:
            weights = np.array(policy.weights)
            np.testing.assert_allclose(weights / weights.sum(), theirs.choice_weights)
    else:
        ops = [op for (op,) in theirs.policy]
        assert policy.layers == 1
    assert policy.ops == tuple(op.name for op in ops)
    assert policy.magnitudes == tuple(op.magnitude for op in ops)
    for op in ops:
        assert policy.prob == op.prob
        assert policy.noise == op.magnitude_std
        assert policy.limit == (op.magnitude_max or 10.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not known"),
        ("augment-m3", "is not known"),
        ("augmix-w11", "from 1 to 10"),
        ("augmix-b1", "none of m, w, d, mstd"),
        ("ta_wide-m3", "not known there"),
        ("rand-m", '"m" in'),
        ("rand-x3", '"x3" in'),
        ("rand-w0", '"w0" in'),
        ("rand-m9.5", "whole number"),
        ("rand-mstd0.5.1", "one number"),
        ("rand-mstdinf", '"mstdinf" in'),
        ("rand-m9-m8", "twice"),
        ("rand-tall", '"tall" is not known'),
        ("rand-p1.5", "probability"),
        ("rand-n0", "n0"),
        ("rand-n101", "n101"),
        ("rand-n15-t3aw", "14 weighted operations"),
        ("3a-m9", '"m9" in'),
        ("RAND-m9", "is not known"),
    ],
)
def test_a_wrong_notation_is_an_error_that_says_what(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_policy(text)


def test_the_notation_needs_neither_torch_nor_timm() -> None:
    code = "import sys, trainyard.data.augment.policy; print({'torch', 'timm'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --- draws ---

COUNT = 20_000


def drawn(policy: Policy, seed: int = 11, count: int = COUNT) -> DrawnOperations:
    return draw(policy, seed, np.arange(count), np.zeros(count, np.int64))


def timms_draws(text: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """As Draws.ops and .arguments, -1 and nan where nothing is done."""
    random.seed(1)
    np.random.seed(1)
    transform = timms(text)
    ops = transform.ops if text.startswith("rand") else [op for (op,) in transform.policy]
    record: list[tuple[int, float]] = []
    for number, op in enumerate(ops):

        def note(image: list[Any], *arguments: float, number: int = number, **_: Any) -> list[Any]:
            record.append((number, arguments[0] if arguments else 0.0))
            return image

        op.aug_fn = note
    layers = parse_policy(text).layers
    found = np.full((COUNT, layers, 2), (-1, np.nan))
    for row in range(COUNT):
        record.clear()
        transform([])
        found[row, : len(record)] = np.array(record).reshape(-1, 2)
    return found[..., 0], found[..., 1]


@pytest.mark.parametrize(
    "text",
    [
        "rand-m9-mstd0.5-inc1",
        "rand-m5-mstd3-n2",
        "rand-m12-mmax15-mstd101-inc1-n1-p0.8",
        "rand-m8-n3-tweights",
        "rand-m6-mstd2-n2-t3aw-p0.9",
    ],
)
def test_operations_and_arguments_are_distributed_as_timms(text: str) -> None:
    policy = parse_policy(text)
    ours = drawn(policy)
    their_ops, their_arguments = timms_draws(text)
    # Standard error of a share of 20,000 is at most 0.0035; timm does not say which were skipped.
    assert (ours.ops >= 0).mean() == pytest.approx((their_ops >= 0).mean(), abs=0.012)
    for number, name in enumerate(policy.ops):
        mine, other = ours.arguments[ours.ops == number], their_arguments[their_ops == number]
        share = len(mine) / COUNT
        assert share == pytest.approx(len(other) / COUNT, abs=0.015), name
        assert (mine < 0).mean() == pytest.approx((other < 0).mean(), abs=0.12), name
        if name == "Desaturate":  # ours is Color's factor, theirs one less that
            other = 1 - other
        spread = max(other.std(), 1e-9)
        tolerance = 5 * spread * np.sqrt(1 / len(mine) + 1 / len(other)) + 1e-9
        assert mine.mean() == pytest.approx(other.mean(), abs=tolerance), name
        assert mine.std() == pytest.approx(spread, rel=0.3, abs=1e-6), name
        assert mine.min() >= other.min() - 4 * spread, name


def test_arguments_are_those_of_timm_for_equal_levels() -> None:
    """Without noise every operation has timm's one argument, or that and its negative."""
    for text in ["rand-m9-p1", "rand-m9-p1-inc1", "rand-m14-mmax14-p1-inc1", "rand-m3-p1-t3a"]:
        policy = parse_policy(text)
        ours = drawn(policy, count=3000)
        for number, name in enumerate(policy.ops):
            level = min(policy.magnitudes[number], policy.limit)
            function: Any = auto_augment.LEVEL_TO_ARG[name]
            expected = {0.0}
            if function is not None:
                expected = {float(function(level, {})[0]) for _ in range(60)}
            if name == "Desaturate":
                expected = {1 - value for value in expected}
            found = set(ours.arguments[ours.ops == number].tolist())
            np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-12, err_msg=name)


def test_radii_and_weighted_operations() -> None:
    policy = parse_policy("3a")
    ours = drawn(policy)
    radii = ours.arguments[ours.ops == policy.ops.index("GaussianBlurRand")]
    found = [radii.min(), radii.mean(), radii.max()]
    assert found == pytest.approx([0.1, 1.05, 2.0], abs=0.03)  # uniform
    policy = parse_policy("rand-n14-p1-t3aw")
    ops = np.sort(drawn(policy, count=500).ops, axis=1)
    assert (ops == np.arange(14)).all()
    assert (np.sort(drawn(parse_policy("rand-n15-p1"), count=500).ops) != np.arange(15)).any()


def test_draws_are_keyed_by_seed_visit_and_id() -> None:
    policy = parse_policy("rand-m9-n3-mstd0.5-inc1")
    ids, visits = np.arange(50), np.full(50, 2)
    whole = draw(policy, 7, ids, visits)
    for mine, part in zip(whole, draw(policy, 7, ids[[41, 3]], visits[:2]), strict=True):
        np.testing.assert_array_equal(mine[[41, 3]], part)
    for other in (draw(policy, 8, ids, visits), draw(policy, 7, ids, visits + 1)):
        assert (other.ops != whole.ops).any()
