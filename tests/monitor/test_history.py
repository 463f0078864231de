"""Reading back what a run has reported."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from trainyard.monitor import environment
from trainyard.monitor.history import read_history, score
from trainyard.monitor.outcome import Outcome
from trainyard.monitor.trackers.tracker import BestEvaluation


def written(path: Path, *reports: dict[str, Any], end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps(report) for report in reports) + end)
    return path


def train(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": loss}


def test_after_a_kill_the_later_report_counts(tmp_path: Path) -> None:
    path = written(
        tmp_path / "metrics.jsonl",
        *(train(10, 3.0), train(20, 2.0), train(30, 1.0)),
        {"kind": "val", "step": 30, "top1": 0.1},
        {"kind": "event", "step": 10, "event": "resumed"},
        *(train(20, 2.5), train(25, 1.5)),
        {"kind": "val", "step": 25, "top1": 0.2},
    )
    history = read_history(path)
    assert [(r["step"], r["loss"]) for r in history.train] == [(10, 3.0), (20, 2.5), (25, 1.5)]
    assert [r["top1"] for r in history.val] == [0.2]
    assert len(history.events) == 1


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", train(1, 1.0), train(2, 1.0), end="")
    assert [report["step"] for report in read_history(path).train] == [1]


@pytest.mark.parametrize(
    "line", ["no json", "[]", '{"kind": "train"}', '{"kind": 3, "step": 1}', "[" * 100_000]
)
def test_a_line_of_another_kind_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"kind": "event", "step": 0}}\n{line}\n')
    with raises("run.not-a-report", path=path, line=2):
        read_history(path)


@pytest.mark.parametrize(
    "values",
    [
        *('"step": true', '"step": -1', '"step": 1.5', '"step": 9223372036854775807'),
        *('"step": 1, "top1": 1.01', '"step": 1, "ema_0.9_top5": -0.1', '"step": 1, "map": "x"'),
        *('"step": 1, "time": -1', '"step": 1, "epoch": 1e30', '"step": 1, "evaluated": []'),
        f'"step": 1, "loss": {"9" * 400}',
    ],
)
def test_a_number_out_of_range_is_named(tmp_path: Path, values: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"kind": "val", {values}}}\n')
    with raises("run.not-a-report", path=path, line=1):
        read_history(path)


def test_a_score_that_is_not_finite_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "val", "step": 1, "top1": NaN, "ema_top1": 0.5, "loss": Infinity}\n')
    (report,) = read_history(path).val
    assert report == {"kind": "val", "step": 1, "top1": None, "ema_top1": 0.5, "loss": None}
    assert score(report, "top1") == 0.5


def test_an_evaluation_that_was_undone_is_not_the_best(tmp_path: Path) -> None:
    best = BestEvaluation(tmp_path / "metrics.jsonl", "top1")
    for step, top1 in ((4, 0.5), (8, 0.9), (6, 0.6)):  # it went back to step 4
        found = best.after({"kind": "val", "step": step, "top1": top1})
    assert found == {"best/step": 6, "best/top1": 0.6}


@pytest.mark.parametrize("top1", ["x", None, [0.5], True])
def test_a_score_that_is_no_number_is_below_all(top1: object) -> None:
    assert score({"top1": top1}, "top1") == -1.0
    assert score({"top1": top1, "ema_top1": 0.0}, "top1") == 0.0


def test_no_file(tmp_path: Path) -> None:
    with raises("file.unreadable", path=tmp_path / "metrics.jsonl"):
        read_history(tmp_path / "metrics.jsonl")


def test_a_line_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    with raises("run.not-a-report", line=1):
        read_history(tmp_path / "metrics.jsonl")


# --- the last line of a run ---


def test_values_are_those_that_chose_the_best() -> None:
    """The higher ones of the weights and their moving average, or another value."""
    last, best = {"step": 30, "top1": 0.7, "ema_top1": 0.8}, {"step": 20, "top1": 0.6}
    best["ema_top1"] = 0.9
    sentence = Outcome("runs/a", 30, 75.4, last, best, None).sentence()
    assert {"80.00%", "90.00%", "20)", "0:01:15;"} <= set(sentence.replace("(", " ").split())
    last, best = {"step": 30, "map": 0.7, "top1": 0.9}, {"step": 20, "map": 0.75, "top1": 0.1}
    sentence = Outcome("runs/a", 30, 1, last, best, None, best_by="map").sentence()
    assert "70.00%" in sentence and "75.00%" in sentence


def test_json_has_no_number_that_json_lacks() -> None:
    """`train --json` of a run whose loss was NaN could not be read by others."""
    outcome = Outcome("runs/a", 30, 1, {"loss": float("nan")}, {"loss": float("inf")}, None)
    tree = json.loads(json.dumps(outcome.as_dict(), allow_nan=False))
    assert tree["last"] == tree["best"] == {"loss": None}


# --- the commit in a run's environment.json is that of Trainyard, or none ---


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def state(repository: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The commit of a Trainyard that lies in a folder of a repository."""
    module = repository / package / "trainyard" / "monitor" / "environment.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(environment, "__file__", str(module))
    return environment.describe_environment()["git"]


def test_the_commit_is_not_that_of_the_users_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment inside of the user's repository gave the user's commit, as "altered"."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "mine")
    packages = ".venv/lib/python3.12/site-packages"
    assert state(tmp_path, packages, monkeypatch) is None
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert state(tmp_path, ".", monkeypatch) == {"commit": commit, "altered": True}
