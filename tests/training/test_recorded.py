"""What a run keeps of its best evaluation."""

import json
from pathlib import Path

import numpy as np

from tests.command_line import SHORT, run
from tests.errors import raises
from trainyard.files import RunDirectory
from trainyard.training.predictions import Predictions, per_class
from trainyard.training.recorded import load_recorded, record


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
    for column in ("place", "guess", "confidence", "loss"):
        np.testing.assert_array_equal(getattr(found.scores, column), getattr(average, column))


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


def test_a_worse_evaluation_does_not_replace_a_better_one(digits: Path, tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path / "run")
    arguments = ("--run", folder.path, *SHORT, "--json", "--run.eval_every", "1 steps")
    assert run("train", "debug", "--data", digits, *arguments) == 0
    vals = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    scores = {r["step"]: r["top1"] for r in vals if r["kind"] == "val"}
    found = load_recorded(folder.predictions)
    assert found is not None
    assert found.step == max(scores, key=lambda step: (scores[step], -step))
