"""What a real MLflow server has of a run, and runs whose server is away or fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.command_line import SHORT, newest
from tests.monitor.trackers.test_read_back import all_reports, environment, numbers, python
from tests.web import free_port
from trainyard.config import load_recipe
from trainyard.files import RunDirectory
from trainyard.monitor.history import read_history
from trainyard.monitor.trackers.mlflow import MlflowTracker

TRACKED = ("--watch.mlflow", "true", "--watch.project", "tests", "--data.threads", "1", "--json")
OPTIONS = (
    *("--run.length", "8 steps", "--run.log_every", "1 steps", "--run.eval_every", "4 steps"),
    *("--run.save_every", "4 steps", "--run.keep", "9", "--watch.artifacts", "true", *TRACKED),
)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """The address and the process of a server whose database and artifacts are in a folder."""
    url = f"http://127.0.0.1:{free_port()}"
    options = ("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1")
    place = ("--port", url.rpartition(":")[2], "--artifacts-destination", f"{folder}/artifacts")
    off = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with open(folder / "server.log", "wb") as log:
        command = [sys.executable, "-m", "mlflow", "server", *options, *place]
        process = subprocess.Popen(
            command, env=os.environ | off, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_for(f"{url}/health")
            yield url, process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it has processes of its own
            process.wait(60)


def _wait_for(url: str) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as (url, _):
        yield url


@pytest.fixture
def here(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    # What the tracker sets, to be unset after the test.
    for name in ("DISABLE_TELEMETRY", "SUPPRESS_PRINTING_URL_TO_STDOUT"):
        monkeypatch.setenv(f"MLFLOW_{name}", "true")
    monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", "WARNING")
    return server


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


def test_a_killed_run_goes_on_as_the_same_run(here: str, digits: Path, tmp_path: Path) -> None:
    """Parameters, every figure, tags, the best evaluation and its checkpoint."""
    run, home = tmp_path / "a run", tmp_path / "home"
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
    assert history["best/top1"][-1][0] == best["step"]
    files = {path.name for path in (run / "checkpoints" / "best").resolve().iterdir()}
    assert {Path(name).name for name in kept["files"]} == files


def test_a_database_on_this_machine(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's default without an address; nothing of its making is printed."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    train = ("-m", "trainyard", "train", "debug", "--data", digits, "--run", tmp_path / "run")
    python(tmp_path / "home", *train, *SHORT, *TRACKED)
    (kept,) = runs_of(tmp_path / "home", "tests")
    assert (tmp_path / "home" / "mlflow.db").is_file()
    assert [step for step, _ in kept["history"]["train/loss"]] == [1, 2]


def tracker(folder: Path, project: str) -> MlflowTracker:
    folder.mkdir(exist_ok=True)
    return MlflowTracker(RunDirectory(folder), {}, project=project, artifacts=False, best_by="top1")


def report(step: int, **values: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "epoch": 0.0, "samples": 0, "time": 0.0} | values


def test_a_run_that_stops_and_more_than_a_request_holds(here: str, tmp_path: Path) -> None:
    at = tracker(tmp_path / "run", "many")
    at.write(report(1, loss=float("nan"), **{f"figure{number}": 1.0 for number in range(2500)}))
    for step in range(2, 6):
        at.write(report(step, loss=1.0))
    at.close()
    (kept,) = runs_of(tmp_path / "home", "many")
    assert kept["status"] == "KILLED"
    assert len(kept["latest"]) == 2500 + 4
    first, *rest = kept["history"]["train/loss"]
    assert (first[0], str(first[1]), rest) == (1, "nan", [[step, 1.0] for step in range(2, 6)])


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
    assert event["message"].startswith("watch.mlflow is off until the run is started again")
    assert address.partition(":")[0] in event["message"]
    assert "secret" not in (tmp_path / "run" / "metrics.jsonl").read_text() + done.stdout
    assert [report["step"] for report in history.train] == [1, 2]


def test_a_server_that_dies_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training does not wait for the requests that MLflow repeats."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with mlflow_server(tmp_path) as (url, process):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        at = tracker(tmp_path / "run", "dies")
        at.write(report(1, loss=1.0))
        assert at._thread.wait(60)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        began = time.monotonic()
        at.write(report(2, loss=1.0))
        assert time.monotonic() - began < 1  # a failing request takes longer
        with pytest.raises(RuntimeError, match="API request"):
            at.close()


def test_a_run_that_the_server_does_not_know(here: str, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackers.json").write_text(json.dumps({"mlflow": "0" * 32}))
    done = failed(digits, tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"watch.mlflow: run {'0' * 32}, which trackers.json" in done.stderr
    assert "not found" in done.stderr
