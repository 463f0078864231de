"""What MLflow's database has of a run, and runs whose server is away."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHORT, newest
from tests.monitor.trackers.test_read_back import all_reports, environment, numbers, python
from tests.web import free_port
from trainyard.config import load_recipe
from trainyard.files import RunDirectory
from trainyard.monitor.history import read_history
from trainyard.monitor.trackers.mlflow import MlflowTracker

# In MLflow's own tables.
pytestmark = [
    pytest.mark.night,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]

TRACKED = ("--watch.mlflow", "true", "--watch.project", "tests", "--data.threads", "1", "--json")
OPTIONS = (
    *("--run.length", "8 steps", "--run.log_every", "1 steps", "--run.eval_every", "4 steps"),
    *("--run.save_every", "4 steps", "--run.keep", "9", "--watch.artifacts", "true", *TRACKED),
)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of MLflow's database and artifacts, where another process reads them."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
    # What the tracker sets, to be unset after the test.
    for name in ("DISABLE_TELEMETRY", "SUPPRESS_PRINTING_URL_TO_STDOUT"):
        monkeypatch.setenv(f"MLFLOW_{name}", "true")
    monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", "WARNING")
    return home


READ = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
experiment = client.get_experiment_by_name(sys.argv[1])
runs = client.search_runs([experiment.experiment_id])
print(json.dumps([{
    "id": run.info.run_id, "name": run.info.run_name, "status": run.info.status,
    "params": run.data.params, "tags": run.data.tags, "latest": run.data.metrics,
    "files": sorted(f.path for f in client.list_artifacts(run.info.run_id, "best")),
    "history": {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
                for key in run.data.metrics},
} for run in runs]))
"""


def runs_of(home: Path, experiment: str) -> list[dict[str, Any]]:
    """The runs of an experiment as another process reads them."""
    found: list[dict[str, Any]] = json.loads(python(home, "-c", READ, experiment))
    return found


def test_a_killed_run_goes_on_as_the_same_run(database: Path, digits: Path, tmp_path: Path) -> None:
    """Parameters, every figure, tags, the best evaluation and its checkpoint."""
    run, home = tmp_path / "a run", database
    train = ("-m", "trainyard", "train", "debug", "--data", digits, "--run", run, *OPTIONS)
    assert json.loads(python(home, *train))["step"] == 8
    shutil.rmtree(newest(run))
    # A key that may change does not fail at MLflow, whose parameters are final.
    assert json.loads(python(home, *train, "--run.keep", "8"))["step"] == 8
    (kept,) = runs_of(home, "tests")
    assert kept["id"] == json.loads((run / "trackers.json").read_text())["mlflow"]
    assert (kept["name"], kept["status"]) == ("a run", "FINISHED")
    assert kept["tags"]["trainyard.version"]
    recipe = load_recipe(str(run / "recipe.toml")).model_dump(mode="json")
    assert kept["params"]["optim.name"] == recipe["optim"]["name"]
    assert float(kept["params"]["optim.lr"]) == recipe["optim"]["lr"]
    assert kept["params"]["run.keep"] == "9"
    assert len(kept["params"]) == sum(map(len, recipe.values()))
    expected: dict[str, list[tuple[int, float]]] = {}
    for report in all_reports(run):
        for key, value in numbers(report).items():
            if key != "step":
                expected.setdefault(key, []).append((report["step"], value))
    history = {key: [tuple(at) for at in values] for key, values in kept["history"].items()}
    shown = {key: values for key, values in history.items() if not key.startswith("best/")}
    assert {key: sorted(values) for key, values in shown.items()} == {
        key: sorted(values) for key, values in expected.items()
    }
    best = max(read_history(run / "metrics.jsonl").val, key=lambda report: report["top1"])
    assert kept["latest"]["best/top1"] == best["top1"]
    assert kept["latest"]["best/step"] == best["step"]
    files = {path.name for path in (run / "checkpoints" / "best").resolve().iterdir()}
    assert {Path(name).name for name in kept["files"]} == files


def tracker(folder: Path, project: str) -> MlflowTracker:
    folder.mkdir(exist_ok=True)
    recipe = load_recipe("debug", {"watch.project": project})
    return MlflowTracker(RunDirectory(folder), recipe.model_dump(mode="json"))


def report(step: int, **values: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "epoch": 0.0, "samples": 0, "time": 0.0} | values


def test_a_run_that_stops_and_more_than_a_request_holds(database: Path, tmp_path: Path) -> None:
    at = tracker(tmp_path / "run", "many")
    at.write(report(1, loss=float("nan"), **{f"figure{number}": 1.0 for number in range(2500)}))
    for step in range(2, 6):
        at.write(report(step, loss=1.0))
    at.close()
    (kept,) = runs_of(database, "many")
    assert kept["status"] == "KILLED"
    assert len(kept["latest"]) == 2500 + 4
    first, *rest = kept["history"]["train/loss"]
    assert (first[0], str(first[1]), rest) == (1, "nan", [[step, 1.0] for step in range(2, 6)])


def test_an_evaluation_that_was_undone_is_not_the_best(database: Path, tmp_path: Path) -> None:
    """A rollback left its accuracy as best/top1."""
    at = tracker(tmp_path / "run", "undone")
    for step, top1 in ((4, 0.5), (8, 0.9), (6, 0.6), (8, 0.4)):
        at.write(report(step, top1=top1) | {"kind": "val"})
    at.close()
    (kept,) = runs_of(database, "undone")
    assert (kept["latest"]["best/step"], kept["latest"]["best/top1"]) == (6, 0.6)


def failed(digits: Path, folder: Path, *more: object) -> "subprocess.CompletedProcess[str]":
    train = ("train", "debug", "--data", digits, "--run", folder / "run", *SHORT, *TRACKED, *more)
    (folder / "home").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "trainyard", *map(str, train)],
        env=environment(folder / "home"),
        cwd=folder / "home",
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_server_that_is_away_does_not_end_the_run(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once; the password of the address is not."""
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@{address}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    done = failed(digits, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    history = read_history(tmp_path / "run" / "metrics.jsonl")
    (event,) = (event for event in history.events if event["event"] == "tracker")
    assert "watch.mlflow" in event["message"]
    assert address.partition(":")[0] in event["message"]
    assert "secret" not in (tmp_path / "run" / "metrics.jsonl").read_text() + done.stdout
    assert [report["step"] for report in history.train] == [1, 2]


def test_a_run_that_the_server_does_not_know(database: Path, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackers.json").write_text(json.dumps({"mlflow": "0" * 32}))
    done = failed(digits, tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"watch.mlflow: run {'0' * 32}, which trackers.json" in done.stderr
    assert "not found" in done.stderr
