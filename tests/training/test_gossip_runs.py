"""Whole runs whose replicas differ: cut off, gone on with, gone back, evaluated and exported."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tests.command_line import Capture, newest, shown
from tests.spawn import end_by, spawn, train_joined
from tests.training.test_resume import assert_equal, curve, read
from trainyard.config import RunConfig, load_recipe
from trainyard.errors import RecipeError, Stopped
from trainyard.run import train as trainyard_run
from trainyard.training.step import StepStats, TrainStep
from trainyard.world import World

NUM_STEPS = 16
OPTIONS = {
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "5 steps",
    "run.eval_every": "7 steps",
    "run.log_every": "1 step",
    "batch.size": "64",
    "data.threads": "1",
    "model.name": "test_resnet",  # with batch norm
    "model.ema_decay": "0.8",
    "average.name": "gossip",
    "average.topology": "ring",
    "average.mixing": "0.7",
}
Before = Callable[[World, Any, int], None]
"""What happens to a rank's batch before a step."""


def recipe(digits: Path, **options: str) -> RunConfig:
    data = {"data.train": str(digits / "train"), "data.val": str(digits / "val")}
    return load_recipe("debug", OPTIONS | data | options)


def train(world: World, config: RunConfig, folder: Path, before: Before) -> bool:
    """Whether the run was stopped."""
    torch.set_num_threads(1)
    update = TrainStep.__call__

    def update_after(self: TrainStep, batch: Any, step: int, rates: Any) -> StepStats:
        before(world, batch, step)
        return update(self, batch, step, rates)

    TrainStep.__call__ = update_after  # type: ignore[method-assign]
    outcome = train_joined(config, folder, world)
    assert outcome.stopped in (None, Stopped)
    return outcome.stopped is not None


def nothing(world: World, batch: Any, step: int) -> None:
    pass


def kill_in_step_6(world: World, batch: Any, step: int) -> None:
    if step == 6:
        end_by(signal.SIGKILL)


def stop_one_in_step_5(world: World, batch: Any, step: int) -> None:
    if step == 5 and world.rank == 2:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def uninterrupted(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert spawn(train, 4, recipe(digits), folder, nothing) == [False] * 4
    return folder


@pytest.fixture(scope="module")
def killed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, killed in its step 6, after the checkpoint of step 5."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    with pytest.raises(AssertionError):
        spawn(train, 4, recipe(digits), folder, kill_in_step_6)
    assert newest(folder).name == "step-00000005"
    return folder


def all_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds, but for rates, which are set before each step, and times."""
    files = [checkpoint / "training.pt", *sorted(checkpoint.glob("replicas/*.pt"))]
    found = {file.name: torch.load(file, weights_only=True) for file in files}
    for state in found.values():
        for group in state.get("optimizer", {}).get("param_groups", ()):
            del group["lr"]
    for name in ("model", "ema"):
        found[name] = load_file(checkpoint / f"{name}.safetensors")
    found["progress"] = json.loads((checkpoint / "progress.json").read_text())
    del found["progress"]["clock"]
    return found


def test_cut_off_it_ends_as_uninterrupted(
    uninterrupted: Path, killed: Path, digits: Path, tmp_path: Path
) -> None:
    """Killed, gone on with, stopped by a signal to one rank, gone on with: bit for bit.

    Of each replica weights, batch norm, moving average and moments.
    """
    folder = Path(shutil.copytree(killed, tmp_path / "run", symlinks=True))
    assert spawn(train, 4, recipe(digits), folder, stop_one_in_step_5) == [True] * 4
    assert newest(folder).name == "step-00000008"  # in the evaluation there all hear of it
    assert spawn(train, 4, recipe(digits), folder, nothing) == [False] * 4
    ours, theirs = all_of(newest(folder)), all_of(newest(uninterrupted))
    assert len([name for name in ours if name.endswith(".pt")]) == 5
    assert_equal(ours, theirs)
    for kind, *keys in (("train", "loss", "lr"), ("val", "top1", "loss", "consensus_distance")):
        assert curve(folder, kind, *keys) == curve(uninterrupted, kind, *keys)
    assert not [line for line in read(folder / "metrics.jsonl") if line.get("event") == "replicas"]


def test_another_number_of_replicas_goes_on_from_the_mean(
    killed: Path, digits: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "run", symlinks=True))
    spawn(train, 2, recipe(digits), folder, nothing)
    events = [line for line in read(folder / "metrics.jsonl") if line["kind"] == "event"]
    (said,) = [event["message"] for event in events if event["event"] == "replicas"]
    assert said.startswith("4 replicas were saved and 2 go on: all from their mean")
    assert newest(folder).name == f"step-{NUM_STEPS:08d}"
    assert len(list(newest(folder).glob("replicas/*.pt"))) == 2


def test_what_is_evaluated_exported_and_best_is_the_mean(
    uninterrupted: Path, capsys: Capture
) -> None:
    checkpoint = newest(uninterrupted)
    replicas = [
        torch.load(file, weights_only=True)["averager"]["own"]
        for file in sorted(checkpoint.glob("replicas/*.pt"))
    ]
    for number, name in enumerate(("model", "ema")):
        for key, mean in load_file(checkpoint / f"{name}.safetensors").items():
            if mean.is_floating_point():
                own = torch.stack([replica[number][key] for replica in replicas])
                torch.testing.assert_close(mean, own.mean(0))
                assert not torch.equal(own[0], own[1])  # they do differ
    values = curve(uninterrupted, "val", "top1", "ema_top1", "consensus_distance")
    assert list(values) == [7, 14, NUM_STEPS]
    for link in ("latest", "best"):
        path = (uninterrupted / "checkpoints" / link).resolve()
        found = json.loads(shown(capsys, "evaluate", path, "--json"))
        at_its_step = values[int(path.name.removeprefix("step-"))]
        assert [found["top1"], found["ema_top1"]] == pytest.approx(at_its_step[:2], abs=1e-9)
    assert all(distance > 1e-3 for _, _, distance in values.values())


def spoil(world: World, batch: Any, step: int) -> None:
    """One replica's batches from the sixth to the tenth that it sees."""
    seen = SEEN.setdefault(world.rank, [])
    seen.append(step)
    if world.rank == 1 and 6 <= len(seen) <= 10:
        batch.images_BCHW[0] = torch.nan


SEEN: dict[int, list[int]] = {}


def train_and_tell(world: World, config: RunConfig, folder: Path) -> list[int]:
    train(world, config, folder, spoil)
    return SEEN[world.rank]


def test_the_gradients_of_one_replica_send_all_back(digits: Path, tmp_path: Path) -> None:
    config = recipe(digits, **{"run.max_skipped": "5", "run.length": "12 steps"})
    ranks = spawn(train_and_tell, 2, config, tmp_path / "run")
    assert ranks == [[*range(10), *range(5, 12)]] * 2
    lines = read(tmp_path / "run" / "metrics.jsonl")
    (said,) = [line["message"] for line in lines if line.get("event") == "rolled back"]
    assert "up to step 10: went back to step 5, past its data" in said
    skipped = [line["skipped"] for line in lines if line["kind"] == "train"]
    assert skipped == [0] * 5 + [0.5] * 5 + [0] * 7  # of two replicas, in the mean
    found = all_of(newest(tmp_path / "run"))
    assert all(weights.isfinite().all() for weights in found["model"].values())
    for name in ("00000.pt", "00001.pt"):
        for module in found[name]["averager"]["own"]:
            assert all(weights.isfinite().all() for weights in module.values())


# --- what cannot be ---


def train_wrongly(world: World, config: RunConfig, folder: Path) -> str:
    try:
        train(world, config, folder, nothing)
    except RecipeError as error:
        assert error.is_shared
        return str(error)
    raise AssertionError("it trains")


def test_mistakes_are_told_before_a_directory_is_made(digits: Path, tmp_path: Path) -> None:
    wrong = {"average.topology": "one-peer-exponential"}
    (said,) = set(spawn(train_wrongly, 3, recipe(digits, **wrong), tmp_path / "run"))
    assert "needs 1, 2, 4, ... replicas, not 3: take 'ring' or 'complete'" in said
    assert not (tmp_path / "run").exists()


def test_schedule_free_optimizers_are_refused(digits: Path) -> None:
    with pytest.raises(RecipeError, match=r"'gossip' cannot go with optim.name = 'schedule_free_s"):
        recipe(digits, **{"optim.name": "schedule_free_sgd", "run.bn_samples": "64"})


def test_a_world_of_one_runs(digits: Path, tmp_path: Path) -> None:
    config = recipe(digits, **{"run.length": "2 steps"})
    trainyard_run.train(config, tmp_path / "run", world=World(), console=Console(quiet=True))
    assert "consensus_distance" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not list(newest(tmp_path / "run").glob("replicas"))
