"""Trackers that are missing or fail: what cannot be mended later is said at once, else once."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.command_line import SHORT, Capture, run
from tests.errors import check, refused
from tests.monitor.trackers.test_read_back import environment
from trainyard.config import load_recipe
from trainyard.files import RunDirectory
from trainyard.monitor.history import read_history
from trainyard.monitor.reports import Report
from trainyard.monitor.trackers.tensorboard import TensorboardTracker
from trainyard.monitor.trackers.tracker import Guarded, Tracker
from trainyard.monitor.trackers.wandb import WandbTracker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow"])
def test_a_package_that_is_missing_is_said_before_anything_is_trained(
    name: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as Python has it for what is not to be imported
    folder = tmp_path / "run"
    words = ("train", "debug", "--data", digits, "--run", folder, f"--watch.{name}", "true")
    check(refused(*words), "tracker.not-installed", name=name)
    assert not folder.exists()


def test_nobody_is_logged_in(digits: Path, tmp_path: Path) -> None:
    """W&B would ask for a key, and the run would wait."""
    command = ("train", "debug", "--data", digits, "--run", tmp_path / "run", *SHORT)
    done = subprocess.run(
        [sys.executable, "-m", "trainyard", *map(str, command), "--watch.wandb", "true"],
        env=environment(tmp_path) | {"WANDB_MODE": "online"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("trainyard: watch.wandb: No API key")
    assert done.stderr.count("\n") == 1
    assert "WANDB_MODE=offline" in done.stderr


def test_the_end_of_a_process_does_not_wait_for_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B tries a server that is away for 90 s by default, and the interpreter waits for it."""
    wandb = pytest.importorskip("wandb")
    given: list[float] = []

    def init(*, settings: Any, **_: object) -> None:
        given.append(settings.init_timeout)
        raise OSError("no answer")

    monkeypatch.setattr(wandb, "setup", lambda **_: None)
    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(OSError, match="no answer"):
        WandbTracker(RunDirectory(tmp_path), load_recipe("debug").model_dump(mode="json"))
    assert given == [20]


def test_one_that_cannot_begin_does_not_end_the_run(
    digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").touch()  # where a folder is to be
    train = ("train", "debug", "--data", digits, "--run", tmp_path / "run", *SHORT)
    assert run(*train, "--watch.tensorboard", "true") == 0
    history = read_history(tmp_path / "run" / "metrics.jsonl")
    (event,) = (event for event in history.events if event["event"] == "tracker")
    assert (event["level"], event["step"]) == ("warning", 0)
    assert "watch.tensorboard" in event["message"]
    assert event["message"] in capsys.readouterr().out
    assert len(history.train) == 2


# --- failures and hangs, of any tracker ---

REPORT = {"kind": "train", "step": 1, "loss": 1.0, "epoch": 0.0, "samples": 0, "time": 0.0}


class Tracking:
    """A tracker whose calls wait for `answers`, and fail with an error if there is one."""

    def __init__(self, answers: threading.Event, error: Exception | None = None) -> None:
        self.written: list[Report] = []
        self.is_closed = False
        self._answers, self._error = answers, error

    def write(self, report: Report) -> None:
        assert self._answers.wait(60)
        if self._error is not None:
            raise self._error
        self.written.append(report)

    def complete(self) -> None:
        assert self._answers.wait(60)

    def close(self) -> None:
        assert self._answers.wait(60)
        self.is_closed = True


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """Set after a test at the latest, so that no thread of it goes on waiting."""
    event = threading.Event()
    yield event
    event.set()


def test_one_that_is_slow_gets_all_reports(answers: threading.Event) -> None:
    warnings: list[str] = []
    tracker = Tracking(answers)
    guarded = Guarded("slow", lambda: tracker, warnings.append)
    for step in range(1000):  # no call waits: nothing is answered yet
        guarded.write(REPORT | {"step": step})
    guarded.complete()
    assert tracker.written == []
    answers.set()
    guarded.close()
    assert [report["step"] for report in tracker.written] == list(range(1000))
    assert (tracker.is_closed, warnings) == (True, [])


def test_one_that_hangs_does_not_keep_the_run(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it opens, in a report and at the end."""
    for name in ("_START_S", "_PATIENCE_S"):
        monkeypatch.setattr(f"trainyard.monitor.trackers.tracker.{name}", 0.01)
    warnings: list[str] = []

    def opened() -> Tracker:
        assert answers.wait(60)
        return Tracking(answers)

    for open_tracker in (opened, lambda: Tracking(answers)):
        guarded = Guarded("hangs", open_tracker, warnings.append)
        guarded.write(REPORT)
        guarded.close()
    assert len(warnings) == 2
    assert all("watch.hangs" in warning for warning in warnings)


def test_one_that_never_answers_is_waited_for_once(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps took 100 s: it was waited for at the start, and as long at the end."""
    waits = []

    class Waiting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(0)

    def opened() -> Tracker:
        assert answers.wait(60)
        return Tracking(answers)

    monkeypatch.setattr("trainyard.monitor.trackers.tracker.Event", Waiting)
    warnings: list[str] = []
    guarded = Guarded("away", opened, warnings.append)
    guarded.write(REPORT)
    guarded.close()
    assert waits == [10, 0]
    assert len(warnings) == 1


def test_one_that_fails_is_off_and_that_is_said_once(answers: threading.Event) -> None:
    answers.set()
    warnings: list[str] = []
    error = OSError("no route to https://me:secret@host/api\nand more")
    tracker = Tracking(answers, error)
    guarded = Guarded("fails", lambda: tracker, warnings.append)
    while not warnings:
        guarded.write(REPORT)
    guarded.write(REPORT)
    guarded.close()
    assert (len(warnings), tracker.is_closed) == (1, True)
    assert "https://host/api" in warnings[0] and "secret" not in warnings[0]


def test_one_that_has_failed_is_closed_before_the_end(answers: threading.Event) -> None:
    """A process that ended meanwhile printed a traceback of W&B's."""
    warnings: list[str] = []

    class Closing(Tracking):
        def write(self, report: Report) -> None:
            raise OSError("gone")

    tracker = Closing(answers)
    guarded = Guarded("fails", lambda: tracker, warnings.append)
    while not warnings:
        guarded.write(REPORT)
    threading.Timer(0.2, answers.set).start()
    guarded.close()
    assert (len(warnings), tracker.is_closed) == (1, True)


FAILING = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from trainyard.config import load_recipe
from trainyard.files import RunDirectory
from trainyard.run.build import build_run_course
from trainyard.run.loggers import open_loggers
from trainyard.world import World

folder = RunDirectory(Path(sys.argv[1]))
folder.path.mkdir()
config = load_recipe("debug", {"watch.wandb": "true"})
place = {"epoch": 0.0, "samples": 0, "time": 0.0}
numbers = {"images_per_s": 1.0, "loss": 1.0, "lr": 1.0}

def children():
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [pid for task in tasks for pid in task.read_text().split()]
    return [int(pid) for pid in pids if "wandb" in Path(f"/proc/{pid}/cmdline").read_text()]

course = build_run_course(config, 1433)
where = {"num_classes": 10, "world": World(), "console": Console()}
with open_loggers(config, folder, course, lambda: None, **where) as sinks:
    for step in range(1, 9):
        if step == 3:
            (service,) = children()
            os.kill(service, signal.SIGKILL)
            os.waitid(os.P_PID, service, os.WEXITED | os.WNOWAIT)
        sinks.write({"kind": "train", "step": step} | place | numbers)
"""


def test_the_process_of_wandb_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", FAILING, folder],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    history = read_history(folder / "metrics.jsonl")
    assert [report["step"] for report in history.train] == list(range(1, 9))
    (event,) = history.events
    assert "watch.wandb" in event["message"]
    assert event["message"] in done.stdout


def test_a_memory_that_is_none_of_ours(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "trackers.json").write_text("[")
    train = ("train", "debug", "--data", digits, "--run", folder, *SHORT)
    error = refused(*train, "--watch.wandb", "true")
    check(error, "tracker.ids-unreadable", path=folder / "trackers.json")


# --- steps that are made again, for TensorBoard ---


def steps(folder: Path) -> list[int]:
    board = EventAccumulator(str(folder))
    board.Reload()
    return [event.step for event in board.Scalars("train/loss")]


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([[1, 2, 3, 4, ("rolled back", 2), 3, 4, 5]], [1, 2, 3, 4, 5]),
        ([[1, 2, 3, 4], [("initial weights", 0), 1, 2]], [1, 2]),  # killed before its first save
        ([[1, 2, 3, 4], [("bad checkpoint", 0), ("resumed", 3), 4, 5]], [1, 2, 3, 4, 5]),
    ],
    ids=["rolled back", "killed at first", "resumed"],
)
def test_steps_that_are_made_again(
    processes: list[list[int | tuple[str, int]]], expected: list[int], tmp_path: Path
) -> None:
    for reports in processes:
        tracker = TensorboardTracker(RunDirectory(tmp_path), {})
        for report in reports:
            if isinstance(report, int):
                tracker.write({"kind": "train", "step": report, "loss": float(report)})
            else:
                kind, step = report
                tracker.write({"kind": "event", "step": step, "event": kind, "message": kind})
        tracker.close()
    assert steps(tmp_path / "tensorboard") == expected
