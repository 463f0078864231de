"""What trackers have of a run, read back by their own libraries."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.command_line import newest
from tests.monitor.trackers.wandb_files import records
from trainyard.config import load_recipe
from trainyard.monitor.history import History, read_history

pytestmark = pytest.mark.slow

Report = dict[str, Any]

PLACE = {"step": "step", "epoch": "epoch", "samples": "samples", "time": "seconds"}
OPTIONS = (
    *("--watch.wandb", "true", "--watch.artifacts", "true", "--watch.tensorboard", "true"),
    *("--watch.project", "tests", "--data.threads", "1"),
    *("--run.length", "8 steps", "--run.log_every", "1 steps", "--run.eval_every", "4 steps"),
    *("--run.save_every", "4 steps", "--run.keep", "9", "--json"),
)


def environment(home: Path) -> dict[str, str]:
    """One in which nothing of this machine's user is seen, or written to."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    wandb = {f"WANDB_{name}_DIR": str(home / name) for name in ("CACHE", "CONFIG", "DATA")}
    own = {"HOME": str(home), "WANDB_MODE": "offline"}
    return kept | wandb | own | {"PYTHONPATH": str(Path(__file__).parents[3])}


def python(home: Path, *arguments: object) -> str:
    """What a process prints that says nothing of an error."""
    command = [sys.executable, *(f"{argument}" for argument in arguments)]
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        command, env=environment(home), cwd=home, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def tracked(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to step 8 that was killed before it could save that, and went on from step 4."""
    folder = tmp_path_factory.mktemp("tracked")
    train = ("-m", "trainyard", "train", "debug", "--data", digits, "--run", folder / "a run")
    for start in range(2):
        if start == 1:
            shutil.rmtree(newest(folder / "a run"))
        # Nothing of what trackers have to say is printed.
        assert json.loads(python(folder / "home", *train, *OPTIONS))["step"] == 8
    return folder


def all_reports(run: Path) -> list[Report]:
    """Those of steps that were made twice, too."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    reports = [json.loads(line) for line in lines]
    assert [report["step"] for report in reports if report["kind"] == "train"] == [
        *range(1, 9),
        *range(5, 9),
    ]
    return [report for report in reports if report["kind"] != "event"]


def numbers(report: Report) -> dict[str, float]:
    return {
        PLACE.get(key, f"{report['kind']}/{key}"): value
        for key, value in report.items()
        if key != "kind" and value is not None
    }


# --- Weights & Biases ---


def wandb_values(items: Any) -> dict[str, Any]:
    """Without those that W&B adds, "_step" say."""
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    return {key: value for key, value in values.items() if not key.startswith("_")}


def test_wandb_has_one_run_with_every_report(tracked: Path) -> None:
    run = tracked / "a run"
    found = records(run / "wandb")
    started = [record.run for record in found if record.HasField("run")]
    known = json.loads((run / "trackers.json").read_text())["wandb"]
    assert [start.run_id for start in started] == [known, known]
    assert {(start.project, start.display_name) for start in started} == {("tests", "a run")}
    history = [wandb_values(record.history.item) for record in found if record.HasField("history")]
    assert history == [numbers(report) for report in all_reports(run)]


def test_wandb_draws_against_our_own_steps(tracked: Path) -> None:
    found = records(tracked / "a run" / "wandb")
    metrics = [record.metric for record in found if record.HasField("metric")]
    assert [metric.step_metric for metric in metrics if metric.glob_name == "*"] == ["step"] * 2


def test_wandb_has_the_recipe_and_the_best(tracked: Path) -> None:
    run = tracked / "a run"
    found = records(run / "wandb")
    recipe = load_recipe(str(run / "recipe.toml")).model_dump(mode="json")
    for start in (record.run for record in found if record.HasField("run")):
        config = wandb_values(start.config.update)
        assert config == recipe
    summary: dict[str, Any] = {}
    for record in found:
        summary |= wandb_values(record.summary.update)
    best = max(read_history(run / "metrics.jsonl").val, key=lambda report: report["top1"])
    assert {key: summary[f"best/{key}"] for key in ("step", "top1", "loss")} == {
        key: best[key] for key in ("step", "top1", "loss")
    }


def test_wandb_has_no_command_line(tracked: Path) -> None:
    """It was recorded and uploaded, with the logins and signatures in locations of data."""
    files = [path for path in (tracked / "a run" / "wandb").rglob("*") if path.is_file()]
    assert files and [path for path in files if b"--run.keep" in path.read_bytes()] == []


def test_wandb_is_given_the_best_checkpoint(tracked: Path) -> None:
    run = tracked / "a run"
    found = records(run / "wandb")
    given = [record.artifact for record in found if record.HasField("artifact")]
    assert len(given) == 2  # each time that it was complete
    best = (run / "checkpoints" / "best").resolve()
    files = {entry.path: Path(entry.local_path) for entry in given[-1].manifest.contents}
    assert set(files) == {path.name for path in best.iterdir()}
    assert {path.parent for path in files.values()} == {best}  # and there is no copy of it
    ends = [record.exit.exit_code for record in found if record.HasField("exit")]
    assert ends == [0, 0]


# --- TensorBoard ---


def test_tensorboard_has_what_counts(tracked: Path) -> None:
    """Steps that were made twice are seen as they were made last."""
    run = tracked / "a run"
    history, board = read_history(run / "metrics.jsonl"), EventAccumulator(f"{run / 'tensorboard'}")
    board.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for report in sorted(history.train + history.val, key=lambda report: report["time"]):
        for tag, value in numbers(report).items():
            if tag != "step":  # its values are floats of 32 bits
                expected.setdefault(tag, []).append((report["step"], float(np.float32(value))))
    shown = {tag: board.Scalars(tag) for tag in board.Tags()["scalars"]}
    assert expected == {tag: [(e.step, e.value) for e in events] for tag, events in shown.items()}
    (text,) = board.Tensors("events/resumed/text_summary")
    assert text.step == 4
    (resumed,) = (event for event in history.events if event["event"] == "resumed")
    assert text.tensor_proto.string_val[0].decode() == resumed["message"]


# --- none at all ---

OFF = """
import sys, threading
# To import them is an error.
sys.modules |= {"wandb": None, "tensorboard": None, "mlflow": None}
from trainyard.command_line import main
assert main(sys.argv[1:]) == 0
print(threading.active_count())
"""


def test_off_is_off(digits: Path, tmp_path: Path) -> None:
    """Nothing is imported, written but the index, or left to run. timm imports wandb, but can do
    without.
    """
    run, home = tmp_path / "run", tmp_path / "home"
    train = ("train", "debug", "--data", digits, "--run", run, "--run.length", "2 steps", "--json")
    said = python(home, "-c", OFF, *train).splitlines()
    assert said[-1] == "1"
    written = {path.name.partition("-")[0] for path in home.rglob("*") if path.is_file()}
    assert written == {"index"}
    names = {path.name for path in run.iterdir()} - {".lock"}
    assert names == {
        *("recipe.toml", "environment.json", "metrics.jsonl", "predictions.npz", "report.html"),
        "checkpoints",
    }


def test_there_is_a_history(tracked: Path) -> None:
    """Or the comparisons above would compare nothing."""
    history: History = read_history(tracked / "a run" / "metrics.jsonl")
    assert (len(history.train), len(history.val), len(history.events)) == (8, 2, 5)
