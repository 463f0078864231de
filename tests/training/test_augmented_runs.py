"""Whole runs with all that is done to batches and targets: resumed, and in micro-batches."""

import signal
from pathlib import Path

import pytest

from tests.training.test_resume import (
    MODELS,
    assert_same_end,
    curve,
    exit_code,
    read,
    words,
)

VIT = MODELS["stochastic depth"]
EVERYTHING = {
    "augment.randaugment": "rand-m9-mstd0.5-inc1",
    "augment.erasing": "0.5",
    "augment.mixup": "0.8",
    "augment.cutmix": "1.0",
    "augment.mix_prob": "0.8",
    "augment.label_smoothing": "0.1",
}
RUNS = {
    "one draw per batch, from a teacher": {
        "augment.mix_mode": "batch",
        "loss.distillation": "hard",
    },
    "one per sample, bce": {
        "augment.mix_mode": "elem",
        "augment.erasing_mode": "rand",
        "loss.name": "bce",
        "loss.bce_threshold": "0.2",
    },
}


@pytest.fixture(scope="module", params=RUNS)
def options(request: pytest.FixtureRequest, finished: Path) -> dict[str, str]:
    teacher = {"loss.teacher": str(finished)} if "teacher" in request.param else {}
    return EVERYTHING | teacher | RUNS[request.param]


def test_a_run_that_was_killed_ends_alike_bit_for_bit(
    options: dict[str, str], digits: Path, tmp_path: Path
) -> None:
    assert exit_code(words(digits, tmp_path / "whole", VIT, options)) == 0
    arguments = words(digits, tmp_path / "run", VIT, options)
    assert exit_code(arguments, stop_at=13, number=signal.SIGKILL) == -signal.SIGKILL
    assert exit_code(arguments) == 0
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("event") == "resumed"] == [10]
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_micro_batches_change_nothing(
    options: dict[str, str], digits: Path, tmp_path: Path
) -> None:
    """Without batch norm; and without stochastic depth, which draws for each micro-batch."""
    common = {"model.name": "test_vit", "run.length": "5 steps", "run.eval_every": "0 steps"}
    curves = []
    for micro in ("64", "6"):
        arguments = words(digits, tmp_path / micro, common, options, {"batch.micro": micro})
        assert exit_code(arguments) == 0
        curves.append(curve(tmp_path / micro, "train", "loss", "top1"))
    whole, cut = curves
    assert list(whole) == [1, 2, 3, 4, 5]
    assert whole[1][0] != whole[5][0]
    for step, values in whole.items():
        assert cut[step] == pytest.approx(values, rel=1e-6)
