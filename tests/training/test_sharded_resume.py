"""Checkpoints of a run whose ranks share the weights: whole, and good for any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.errors import raises
from tests.runs import assert_equal
from tests.spawn import spawn
from tests.steps import CPU, build_state, save_checkpoint
from tests.tiers import tiered
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.sharded import Sharded
from trainyard.model.ema import Ema
from trainyard.optim.config import OptimConfig
from trainyard.optim.optimizers import build_optimizer
from trainyard.training.checkpoint import TrainState, load_checkpoint
from trainyard.world import World

pytestmark = pytest.mark.slow

OPTIMIZERS = ("adamw", "schedule_free_sgd")


def saved(path: Path) -> dict[str, Any]:
    """The tensors of a checkpoint; batch norm's are apart: three ranks save their rounded mean."""
    found = {file.stem: load_file(file) for file in path.glob("*.safetensors")}
    training: dict[str, Any] = torch.load(path / "training.pt", weights_only=True)
    return found | training


def without_statistics(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_statistics(value) if isinstance(value, dict) else value
        for key, value in tensors.items()
        if "running" not in str(key)
    }


def state_of(world: World, optimizer: str) -> TrainState:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    kind: Any = AllReduce if world.size == 1 else Sharded
    averager = kind(AverageConfig(), world, *([CPU] if kind is Sharded else []))
    ema = Ema(model, {"ema-0.5": 0.5, "ema-0.9": 0.9}, warmup=False, cpu=False)
    averager.wrap(model)
    averager.register_emas(ema.modules)
    config = OptimConfig(name=optimizer, lr=0.01)
    return build_state(
        model, build_optimizer(model, config), averager, emas=ema.modules, classes=["a", "b", "c"]
    )


def update(state: TrainState, step: int, rank: int) -> None:
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(7 * step + rank))
    state.averager.divisor(torch.tensor(4.0))
    state.model(images).square().mean().backward()
    for _ in state.averager.ready_parameters(step, divisible=False):
        state.optimizer.step()
    state.optimizer.zero_grad()


def begin(world: World, folder: Path, optimizer: str) -> None:
    """Save the second of two steps."""
    state = state_of(world, optimizer)
    for step in range(2):
        update(state, step, world.rank)
    state.step = 2
    with state.averager.consensus():
        save_checkpoint(state, folder, keep=1, world=world)


def hand_on(world: World, path: Path, folder: Path, optimizer: str) -> bool:
    """Load a checkpoint and save it again. True if the weights and moments share no memory."""
    state = state_of(world, optimizer)
    load_checkpoint(state, path)
    with state.averager.consensus():
        save_checkpoint(state, folder, keep=1, world=world)
    moments = [m for own in state.optimizer.state.values() for m in own.values() if m.ndim]
    locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in moments]
    return all(t.untyped_storage().nbytes() == t.nbytes for t in locals_ if isinstance(t, Tensor))


@pytest.mark.parametrize("optimizer", tiered(OPTIMIZERS, night=["schedule_free_sgd"]))
def test_the_state_is_the_same_on_any_number_of_ranks(optimizer: str, tmp_path: Path) -> None:
    """Four ranks, two, one with all-reduce, three; each keeps no more than its part."""
    spawn(begin, 4, tmp_path / "4", optimizer)
    path = tmp_path / "4" / "step-00000002"
    expected = saved(path)
    assert [file.name for file in path.iterdir() if file.is_dir()] == []
    assert expected["optimizer"]["state"]
    for size in (2, 1, 3):
        assert spawn(hand_on, size, path, tmp_path / f"{size}", optimizer) == [True] * size
        path = tmp_path / f"{size}" / path.name
        assert_equal(without_statistics(saved(path)), without_statistics(expected))
        for name, tensor in saved(path)["model"].items():
            torch.testing.assert_close(tensor, expected["model"][name], rtol=1e-6, atol=1e-7)


def test_state_in_parts_is_refused(tmp_path: Path) -> None:
    """As older releases wrote it."""
    begin(World(), tmp_path, "adamw")
    (tmp_path / "step-00000002" / "sharded").mkdir()
    with raises("checkpoint.sharded", path=tmp_path / "step-00000002"):
        load_checkpoint(state_of(World(), "adamw"), tmp_path / "step-00000002")
