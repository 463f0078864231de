"""Whole runs of replicas that average now and then: cut off, they go on as if they had not been."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import newest
from tests.spawn import spawn, train_joined
from tests.training.test_resume import assert_equal, curve, read
from trainyard.config import RunConfig, load_recipe
from trainyard.training.keeping import point
from trainyard.world import World, together

NUM_STEPS, EVERY = 9, 3
OPTIONS = {
    "model.name": "test_resnet",
    "model.ema_decay": "0.9",
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "2 steps",
    "run.eval_every": "5 steps",
    "run.log_every": "1 step",
    "run.keep": "6",
    "batch.size": "64",
    "data.threads": "1",
    "average.name": "periodic",
    "average.every": f"{EVERY}",
}
WAYS = {
    "DiLoCo": {"average.outer_lr": "0.7", "average.outer_momentum": "0.9"},
    "overlap": {
        "average.overlap": "true",
        "average.outer_momentum": "0.5",
        "average.compress": "int8",
    },
}
CUTS = {"in mid-period": 4, "after a period": 6}


def recipe(digits: Path, way: str) -> RunConfig:
    data = {"data.train": str(digits / "train"), "data.val": str(digits / "val")}
    return load_recipe("debug", OPTIONS | WAYS[way] | data)


def train(world: World, config: RunConfig, folder: Path) -> None:
    train_joined(config, folder, world)


def train_and_go_on(world: World, config: RunConfig, folder: Path) -> None:
    """The whole run, and for each cut one that goes on from its checkpoint."""
    torch.set_num_threads(1)
    train(world, config, folder / "whole")
    for cut, step in CUTS.items():
        with together(world):
            if world.is_first:
                cut_off(folder / "whole", folder / cut, step)
        train(world, config, folder / cut)


def cut_off(whole: Path, folder: Path, step: int) -> None:
    """A copy of a run as it was when it had saved a step."""
    # Stacks are of ranks, of which some are still leaving the run.
    shutil.copytree(whole, folder, symlinks=True, ignore=shutil.ignore_patterns("stacks"))
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    point(folder / "checkpoints" / "latest", folder / "checkpoints" / f"step-{step:08d}")
    lines = [line for line in read(folder / "metrics.jsonl") if line["step"] <= step]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def replicas_of(checkpoint: Path) -> list[Any]:
    paths = sorted((checkpoint / "replicas").glob("*.pt"))
    return [torch.load(path, weights_only=True) for path in paths]


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each way, a folder with the whole run, and those that go on from a cut."""
    folders = {}
    for way in WAYS:
        folders[way] = tmp_path_factory.mktemp("periodic")
        spawn(train_and_go_on, 2, recipe(digits, way), folders[way])
    return folders


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_cut_off(way: str, cut: str, runs: dict[str, Path]) -> None:
    """Every replica ends with the same bits: weights, moments, average, anchor, under way."""
    ours, theirs = newest(runs[way] / cut), newest(runs[way] / "whole")
    assert ours.name == theirs.name == f"step-{NUM_STEPS:08d}"
    for name in ("model.safetensors", "ema.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    for mine, yours in zip(replicas_of(ours), replicas_of(theirs), strict=True):
        for group in [*mine["optimizer"]["param_groups"], *yours["optimizer"]["param_groups"]]:
            del group["lr"]  # is set before each step, and after the last one means nothing
        assert_equal(mine, yours)
    for kind, key in (("train", "loss"), ("val", "consensus_distance"), ("val", "top1")):
        figures = curve(runs[way] / "whole", kind, key)
        assert len(figures) == (NUM_STEPS if kind == "train" else 2)
        assert curve(runs[way] / cut, kind, key) == figures


@pytest.mark.parametrize("way", WAYS)
def test_replicas_differ_and_their_anchor_does_not(way: str, runs: dict[str, Path]) -> None:
    one, other = (replica["averager"] for replica in replicas_of(newest(runs[way] / "whole")))
    assert_equal(one["anchor"], other["anchor"])
    assert_equal(one["momentum"], other["momentum"])
    statistics = [state["own"][0]["bn1.running_mean"] for state in (one, other)]
    assert not torch.equal(*statistics)
    if way == "overlap":
        assert_equal(one["mean"], other["mean"])
        assert not torch.equal(one["start"], other["start"])


def test_another_number_of_replicas_goes_on_from_the_mean(
    runs: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    cut_off(runs["overlap"] / "whole", tmp_path / "run", 4)
    spawn(train, 3, recipe(digits, "overlap"), tmp_path / "run")
    lines = read(tmp_path / "run" / "metrics.jsonl")
    (said,) = [line["message"] for line in lines if line.get("event") == "replicas"]
    assert said.startswith("2 replicas were saved and 3 go on: all from their mean")
    states = [replica["averager"] for replica in replicas_of(newest(tmp_path / "run"))]
    assert len(states) == 3
    for state in states[1:]:
        assert_equal(state["anchor"], states[0]["anchor"])
