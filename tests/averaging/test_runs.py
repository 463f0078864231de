"""Runs whose replicas differ: gone back, refused, alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import trainyard.run.trainer
from tests.command_line import newest
from tests.errors import raises
from tests.runs import (
    events,
    on_each_step,
    read,
)
from tests.spawn import spawn, train_joined
from tests.training.test_resume_ranks import recipe
from trainyard.config import RunConfig
from trainyard.training.step import TrainStep
from trainyard.world import World

pytestmark = pytest.mark.slow


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
    assert [event["step"] for event in events(folder, "rolled back")] == [5]
    skipped = [line["skipped"] for line in read(folder) if line["kind"] == "train"]
    assert skipped == [0] * 5 + [0.5] * 5 + [0] * 7  # of two replicas, in the mean
    modules = [load_file(newest(folder) / "model.safetensors")]
    for path in newest(folder).glob("replicas/*.pt"):
        modules += torch.load(path, weights_only=True)["averager"]["own"].values()
    assert len(modules) == 5
    assert all(tensor.isfinite().all() for module in modules for tensor in module.values())


# --- what cannot be ---


def train_wrongly(world: World, config: RunConfig, folder: Path) -> None:
    with raises("recipe.topology-not-power-of-two", num_found=3) as caught:
        train_joined(config, folder, world)
    assert caught.value.is_shared


def test_a_mistake_is_named_before_a_directory_is_made(digits: Path, tmp_path: Path) -> None:
    config = recipe(digits, "gossip", **{"average.topology": "one-peer-exponential"})
    spawn(train_wrongly, 3, config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_schedule_free_optimizers_are_refused(digits: Path) -> None:
    keys = {"optim.name": "schedule_free_sgd", "schedule.name": "constant"}
    with raises("recipe.keys-conflict"):
        recipe(digits, "gossip", **keys, **{"run.bn_samples": "64"})


def test_a_world_of_one_runs(digits: Path, tmp_path: Path) -> None:
    config = recipe(digits, "gossip", **{"run.length": "2 steps"})
    trainyard.run.trainer.train(
        config, tmp_path / "run", world=World(), console=Console(quiet=True)
    )
    assert "consensus_distance" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not list(newest(tmp_path / "run").glob("replicas"))
