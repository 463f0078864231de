"""What a run keeps of its best evaluation."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.command_line import SHORT, run
from tests.errors import raises
from trainyard.files import RunDirectory
from trainyard.training.predictions import Predictions, per_class
from trainyard.training.recorded import load_recorded, record

LABELS = np.array([1, 1, 2], np.int32)


def said(*places: int) -> Predictions:
    place = np.array(places, np.float32)
    return Predictions(place, place * 0 + 1, place * 0.25, place * 0.5)


def test_what_is_recorded_is_loaded(tmp_path: Path) -> None:
    path, labels = tmp_path / "predictions.npz", np.array([1, 1, 2], np.int32)
    average = said(1, 1, 3)
    record(path, 7, labels, average, weights="ema_")
    found = load_recorded(path)
    assert found is not None
    assert (found.step, found.weights, found.labels.tolist()) == (7, "ema_", [1, 1, 2])
    for column in ("rank_of_truth", "guess", "confidence", "loss"):
        np.testing.assert_array_equal(getattr(found.scores, column), getattr(average, column))
    with np.load(path) as columns:
        assert {"step", "weights", "labels", "place", "guess", "confidence", "loss"} == {*columns}


def test_a_run_records_its_best_evaluation(finished: Path) -> None:
    folder = RunDirectory(finished)
    found = load_recorded(folder.predictions)
    assert found is not None
    vals = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    best = max((r for r in vals if r["kind"] == "val"), key=lambda r: r["top1"])
    assert (found.step, found.scores.evaluation().top1) == (best["step"], best["top1"])
    rows = per_class(found.scores, found.labels)
    assert sum(row.samples for row in rows) == best["evaluated"]


def test_no_file_and_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    assert load_recorded(path) is None
    path.write_bytes(b"PK\x03\x04")
    with raises("run.predictions-unreadable", path=path):
        load_recorded(path)


WRONG: dict[str, list[Any]] = {
    "labels": [LABELS[:2], LABELS[:, None], LABELS - 2, LABELS + 2**30, LABELS + 0.5, LABELS > 1],
    "guess": [said(1, 1).guess, said(1, 1, 3).guess - 3, said(1, 1, 3).guess * np.nan],
    "place": [said(1, -1, 3).rank_of_truth, np.full(3, 2**62), np.full(3, "x")],
    "confidence": [np.full(3, 1.5, np.float32), np.zeros((3, 2), np.float32)],
    "loss": [np.zeros(4, np.float32), np.float32(0), np.zeros(3, complex)],
}


@pytest.mark.parametrize(
    ("name", "column"), [(name, column) for name in WRONG for column in WRONG[name]]
)
def test_a_column_of_another_kind_length_or_range(
    name: str, column: NDArray[Any], tmp_path: Path
) -> None:
    path, kept = tmp_path / "predictions.npz", asdict(said(1, 1, 3)) | {"labels": LABELS}
    np.savez(path, step=7, weights="", **kept | {name: column})
    with raises("run.predictions-unreadable", path=path):
        load_recorded(path)


@pytest.mark.parametrize(
    ("name", "column"),
    [("labels", np.zeros((3, 3), bool)), ("read", np.ones(4, bool)), ("logits", np.zeros((2, 4)))],
)
def test_a_column_of_lists_of_labels(name: str, column: NDArray[Any], tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    kept: dict[str, Any] = {
        "read": np.ones(3, bool),
        "logits": np.zeros((2, 3)),
        "labels": np.zeros((3, 2), bool),
    }
    np.savez(path, step=7, weights="", **kept)
    assert load_recorded(path) is not None
    np.savez(path, step=7, weights="", **kept | {name: column})
    with raises("run.predictions-unreadable", path=path):
        load_recorded(path)


def test_a_worse_evaluation_does_not_replace_a_better_one(digits: Path, tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path / "run")
    arguments = ("--run", folder.path, *SHORT, "--json", "--run.eval_every", "1 steps")
    assert run("train", "debug", "--data", digits, *arguments) == 0
    vals = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    scores = {r["step"]: r["top1"] for r in vals if r["kind"] == "val"}
    found = load_recorded(folder.predictions)
    assert found is not None
    assert found.step == max(scores, key=lambda step: (scores[step], -step))
