"""A tracker is one module and one key of [watch]."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from rich.console import Console

from tests.errors import raises
from trainyard.config import load_recipe
from trainyard.files import RunDirectory
from trainyard.monitor.config import WatchConfig
from trainyard.monitor.reports import Report
from trainyard.run import loggers
from trainyard.run.build import build_run_course
from trainyard.world import World


class Toys(WatchConfig):
    toy: Annotated[bool, "Toy"] = False


class Toy:
    heard: list[object]

    def __init__(self, folder: RunDirectory, recipe: dict[str, Any]) -> None:
        Toy.heard = [folder.path, recipe["watch"]["project"], recipe["run"]["best_by"]]

    def write(self, report: Report) -> None:
        self.heard.append(report["step"])

    def complete(self) -> None: ...

    def close(self) -> None:
        self.heard.append("closed")


def test_a_tracker_is_a_module_and_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("debug")
    config = recipe.model_copy(update={"watch": Toys(toy=True)})
    assert recipe.watch.trackers() == {}
    with raises("tracker.not-installed", name="toy"):
        loggers.check_trackers(config.watch, World())
    module = SimpleNamespace(Toy=Toy)
    monkeypatch.setitem(sys.modules, "trainyard.monitor.trackers.toy", module)
    course, console = build_run_course(config, 100), Console(quiet=True)
    folder = RunDirectory(tmp_path)
    with loggers.open_loggers(
        config, folder, course, lambda: None, num_classes=10, world=World(), console=console
    ) as opened:
        opened.write({"kind": "event", "event": "toys", "message": "out", "level": "info"} | AT)
    assert Toy.heard == [tmp_path, "trainyard", config.run.best_by, 3, "closed"]


AT: Report = {"step": 3, "epoch": 0.0, "samples": 0, "time": 0.0}


def test_trackers_that_are_on_are_known_by_their_classes() -> None:
    keys = {"watch.mlflow": "true", "watch.tensorboard": "true", "watch.artifacts": "true"}
    wanted = {"tensorboard": "TensorboardTracker", "mlflow": "MlflowTracker"}
    assert load_recipe("debug", keys).watch.trackers() == wanted
