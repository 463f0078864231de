"""Whole runs of every averager: killed, stopped, gone on with, gone back, evaluated."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import trainyard.run.trainer
from tests.command_line import Capture, newest, shown
from tests.runs import (
    OPTIONS,
    RESNET,
    assert_equal,
    contents,
    curve,
    cut_off,
    events,
    of_digits,
    on_each_step,
    read,
    train,
)
from tests.spawn import end_by, spawn, train_joined
from trainyard.config import RunConfig, load_recipe
from trainyard.errors import RecipeError, Stopped
from trainyard.training.step import TrainStep
from trainyard.world import World

pytestmark = pytest.mark.slow

NUM_STEPS, SIZE = 9, 2
BASE = OPTIONS | {
    "model.ema_decay": "0.9",
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "2 steps",
    "run.eval_every": "5 steps",
    "run.keep": "6",
}
PERIODIC = {"average.name": "periodic", "average.every": "3"}
GOSSIP = {"average.name": "gossip", "average.topology": "ring"}
ADAMW = {"optim.name": "adamw", "optim.lr": "0.001", "optim.clip_norm": "0.5"}
WAYS = {
    "gossip": RESNET | GOSSIP,
    "DiLoCo": RESNET | PERIODIC | {"average.outer_lr": "0.7", "average.outer_momentum": "0.9"},
    "sharded": ADAMW | {"average.name": "sharded", "batch.micro": "8"},
}
CUTS = {"in mid-period": 4, "after a period": 6}


def recipe(digits: Path, way: str, **options: str) -> RunConfig:
    return load_recipe("debug", BASE | of_digits(digits) | WAYS[way] | options)


def train_and_go_on(world: World, config: RunConfig, folder: Path) -> None:
    """The whole run, and for each cut one that goes on from its checkpoint."""
    train(world, config, folder / "whole")
    for cut, step in CUTS.items():
        if world.is_first:
            cut_off(folder / "whole", folder / cut, step)
        train(world, config, folder / cut)


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each way, a folder with the whole run, and those that go on from a cut."""
    folders = {}
    for way in WAYS:
        folders[way] = tmp_path_factory.mktemp("runs")
        spawn(train_and_go_on, SIZE, recipe(digits, way), folders[way])
    return folders


def replicas_of(checkpoint: Path) -> list[Any]:
    paths = sorted((checkpoint / "replicas").glob("*.pt"))
    return [torch.load(path, weights_only=True)["averager"] for path in paths]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_cut_off(way: str, cut: str, runs: dict[str, Path]) -> None:
    """All is the same bit for bit, of every replica: weights, moments, statistics, average."""
    ours, theirs = newest(runs[way] / cut), newest(runs[way] / "whole")
    assert ours.name == theirs.name == f"step-{NUM_STEPS:08d}"
    assert_equal(contents(ours), contents(theirs))
    for kind, *keys in (("train", "loss", "lr"), ("val", "top1", "loss")):
        figures = curve(runs[way] / "whole", kind, *keys)
        assert len(figures) == (NUM_STEPS if kind == "train" else 2)
        assert curve(runs[way] / cut, kind, *keys) == figures
    assert not events(runs[way] / cut, "replicas")


@pytest.mark.parametrize(("way", "size"), [("gossip", 3), ("DiLoCo", 3), ("sharded", 1)])
def test_another_number_of_ranks_goes_on(
    way: str, size: int, runs: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    """One rank of a sharded run takes all-reduce, whatever the recipe says."""
    folder = cut_off(runs[way] / "whole", tmp_path / "run", 4)
    spawn(train, size, recipe(digits, way), folder)
    assert newest(folder).name == f"step-{NUM_STEPS:08d}"
    said = [event["message"] for event in events(folder, "replicas")]
    if way == "sharded":
        assert said == []
        check_losses(folder, runs[way] / "whole")
        return
    assert len(said) == 1
    assert said[0].startswith(f"{SIZE} replicas were saved and {size} go on: all from their mean")
    states = replicas_of(newest(folder))
    assert len(states) == size
    assert_equal([state.get("anchor") for state in states], [states[0].get("anchor")] * size)


def check_losses(folder: Path, whole: Path) -> None:
    """The losses of a run are those of `whole`, which had another averager or number of ranks."""
    losses, expected = (curve(each, "train", "loss") for each in (folder, whole))
    assert losses and max(losses) == NUM_STEPS
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-4)


def test_all_reduce_goes_on_from_a_sharded_run(
    runs: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    """Its checkpoint is whole; the moments of channels_last weights have another layout."""
    path = runs["sharded"] / "whole" / "checkpoints" / "step-00000004"
    config = recipe(digits, "sharded", **{"average.name": "allreduce", "run.resume": str(path)})
    spawn(train, SIZE, config, tmp_path / "run")
    check_losses(tmp_path / "run", runs["sharded"] / "whole")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_evaluated_exported_and_best_is_the_mean(
    way: str, runs: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    folder = runs[way] / "whole"
    states = replicas_of(newest(folder))
    for number, name in enumerate(("model", "ema") if states else ()):
        replicas = [state["own"][number] for state in states]
        for key, mean in load_file(newest(folder) / f"{name}.safetensors").items():
            if mean.is_floating_point():
                own = torch.stack([replica[key] for replica in replicas])
                torch.testing.assert_close(mean, own.mean(0))
        assert not torch.equal(*(replica["bn1.running_mean"] for replica in replicas))
    differs = ("consensus_distance",) if states else ()
    values = curve(folder, "val", "top1", "ema_top1", *differs)
    assert list(values) == [5, NUM_STEPS]
    for link in ("latest", "best"):
        path = (folder / "checkpoints" / link).resolve()
        found = json.loads(shown(capsys, "evaluate", path, "--json"))
        expected = values.get(int(path.name.removeprefix("step-")), values[NUM_STEPS])
        assert [found["top1"], found["ema_top1"]] == pytest.approx(expected[:2], abs=1e-9)
    shown(capsys, "export", folder, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").is_file()
    if way == "gossip":
        assert all(distance > 1e-3 for _, _, distance in values.values())


# --- killed and stopped for real ---


def train_until(world: World, config: RunConfig, folder: Path, number: int) -> bool:
    """Whether the run was stopped: in its fifth step all are killed, or one rank gets a signal."""
    torch.set_num_threads(1)

    def signal_itself(_: TrainStep, batch: Any, step: int) -> None:
        if number == signal.SIGKILL and step == 4:
            end_by(number)
        if number == signal.SIGTERM and step == 4 and world.rank == 1:
            os.kill(os.getpid(), number)

    on_each_step(before=signal_itself)
    return train_joined(config, folder, world).stopped is Stopped


def test_killed_stopped_and_gone_on_with(
    runs: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    """Killed after its second checkpoint; then stopped by a signal to one replica."""
    folder, config = tmp_path / "run", recipe(digits, "gossip")
    with pytest.raises(AssertionError):
        spawn(train_until, SIZE, config, folder, signal.SIGKILL)
    assert newest(folder).name == "step-00000004"
    assert spawn(train_until, SIZE, config, folder, signal.SIGTERM) == [True] * SIZE
    assert newest(folder).name < f"step-{NUM_STEPS:08d}"  # in the evaluation all hear of it
    assert spawn(train_until, SIZE, config, folder, 0) == [False] * SIZE
    assert_equal(contents(newest(folder)), contents(newest(runs["gossip"] / "whole")))


def train_on_bad_data(world: World, config: RunConfig, folder: Path) -> list[int]:
    """The steps; one replica's batches from the sixth to the tenth that it sees are bad."""
    torch.set_num_threads(1)
    seen: list[int] = []

    def spoil(_: TrainStep, batch: Any, step: int) -> None:
        seen.append(step)
        if world.rank == 1 and 6 <= len(seen) <= 10:
            batch.images_BCHW[0] = torch.nan

    on_each_step(before=spoil)
    assert train_joined(config, folder, world).stopped is None
    return seen


def test_the_gradients_of_one_replica_send_all_back(digits: Path, tmp_path: Path) -> None:
    changes = {"run.max_skipped": "5", "run.length": "12 steps", "run.save_every": "5 steps"}
    folder = tmp_path / "run"
    ranks = spawn(train_on_bad_data, 2, recipe(digits, "gossip", **changes), folder)
    assert ranks == [[*range(10), *range(5, 12)]] * 2
    (event,) = events(folder, "rolled back")
    assert "up to step 10: went back to step 5, past its data" in event["message"]
    skipped = [line["skipped"] for line in read(folder) if line["kind"] == "train"]
    assert skipped == [0] * 5 + [0.5] * 5 + [0] * 7  # of two replicas, in the mean
    modules = [load_file(newest(folder) / "model.safetensors")]
    modules += [module for state in replicas_of(newest(folder)) for module in state["own"]]
    assert len(modules) == 5
    assert all(tensor.isfinite().all() for module in modules for tensor in module.values())


# --- what cannot be ---


def train_wrongly(world: World, config: RunConfig, folder: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        train_joined(config, folder, world)
    assert caught.value.is_shared
    return str(caught.value)


def test_mistakes_are_told_before_a_directory_is_made(digits: Path, tmp_path: Path) -> None:
    config = recipe(digits, "gossip", **{"average.topology": "one-peer-exponential"})
    (said,) = set(spawn(train_wrongly, 3, config, tmp_path / "run"))
    assert "needs 1, 2, 4, ... replicas, not 3: take 'ring' or 'complete'" in said
    assert not (tmp_path / "run").exists()


def test_schedule_free_optimizers_are_refused(digits: Path) -> None:
    with pytest.raises(RecipeError, match=r"'gossip' cannot go with optim.name = 'schedule_free_s"):
        keys = {"optim.name": "schedule_free_sgd", "schedule.name": "constant"}
        recipe(digits, "gossip", **keys, **{"run.bn_samples": "64"})


def test_a_world_of_one_runs(digits: Path, tmp_path: Path) -> None:
    config = recipe(digits, "gossip", **{"run.length": "2 steps"})
    trainyard.run.trainer.train(
        config, tmp_path / "run", world=World(), console=Console(quiet=True)
    )
    assert "consensus_distance" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not list(newest(tmp_path / "run").glob("replicas"))
