"""Checkpoints of which each rank writes its part: exact, and good for any number of ranks."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.full_disk import full_disk
from tests.runs import read_shards_whole
from tests.spawn import spawn
from tests.steps import CPU, build_state
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.sharded import Sharded
from trainyard.errors import CheckpointError, TrainyardError
from trainyard.model.ema import Ema
from trainyard.optim.config import OptimConfig
from trainyard.optim.optimizers import build_optimizer
from trainyard.training.checkpoint import TrainState, find_problem, load_checkpoint
from trainyard.training.keeping import save_checkpoint
from trainyard.training.optimizer_state import save_optimizer
from trainyard.training.shards import read_shards
from trainyard.world import World


def saved(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, shards made whole."""
    weights = load_file(path / "model.safetensors")
    found = {f"file.{name}": tensor for name, tensor in weights.items()}
    for file in path.glob("ema*.safetensors"):
        found |= {f"{file.stem}.{name}": tensor for name, tensor in load_file(file).items()}
    return found | read_shards_whole(path / "sharded")


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if "running" in name:  # of which three ranks save the mean: a third of three is rounded
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(tensor, theirs[name]), name


def state_of(world: World, optimizer: str) -> TrainState:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    kind: Any = AllReduce if world.size == 1 else Sharded
    averager = kind(AverageConfig(), world, *([CPU] if kind is Sharded else []))
    ema = Ema(model, {"ema-0.5": 0.5, "ema-0.9": 0.9}, warmup=False, cpu=False)
    averager.wrap(model)
    for module in ema.modules.values():
        averager.register_ema(module)
    config = OptimConfig(name=optimizer, lr=0.01)
    return build_state(
        model, build_optimizer(model, config), averager, emas=ema.modules, classes=["a", "b", "c"]
    )


def update(state: TrainState, step: int, rank: int = 0) -> None:
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


def hand_on(world: World, path: Path, folder: Path, optimizer: str) -> dict[str, Any]:
    """Load a checkpoint and save it again; alone, also what is in the model then."""
    state = state_of(world, optimizer)
    load_checkpoint(state, path)
    with state.averager.consensus():
        save_checkpoint(state, folder, keep=1, world=world)
    if world.size > 1:
        return {}
    names = [name for name, _ in state.model.named_parameters()]
    moments = save_optimizer(state.optimizer)["state"]
    found = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    for kind, average in state.emas.items():
        found |= {f"{kind}.{name}": tensor for name, tensor in average.state_dict().items()}
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    by_id = {id(p): name for name, p in state.model.named_parameters()}
    assert len(names) == len(parameters)
    for number, own in moments.items():
        name = by_id[id(parameters[number])]
        found |= {f"optimizer.{name}.{key}": t for key, t in own.items() if is_moment(t)}
    return {name: tensor.numpy() for name, tensor in found.items()}


def is_moment(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free_sgd"])
def test_the_state_is_the_same_on_any_number_of_ranks(optimizer: str, tmp_path: Path) -> None:
    """Four ranks, then two, then one, then three."""
    spawn(begin, 4, tmp_path / "4", optimizer)
    first = tmp_path / "4" / "step-00000002"
    expected = saved(first)
    assert any(name.startswith("optimizer.") for name in expected)
    spawn(hand_on, 2, first, tmp_path / "2", optimizer)
    assert_same(saved(tmp_path / "2" / "step-00000002"), expected)
    (alone,) = spawn(hand_on, 1, tmp_path / "2" / "step-00000002", tmp_path / "1", optimizer)
    sharded = {name: t for name, t in expected.items() if name.startswith(("model.", "ema", "opt"))}
    assert_same({name: torch.from_numpy(array) for name, array in alone.items()}, sharded)
    spawn(hand_on, 3, tmp_path / "1" / "step-00000002", tmp_path / "3", optimizer)
    assert_same(saved(tmp_path / "3" / "step-00000002"), expected)


def save_on_a_full_disk(world: World, folder: Path, rank: int) -> tuple[str, int, bool]:
    """What a rank is told, and with which exit code, when the disk of one of them is full."""
    state = state_of(world, "adamw")
    update(state, 0, world.rank)
    with state.averager.consensus(), full_disk(5000 if world.rank == rank else 1 << 40):
        try:
            save_checkpoint(state, folder, keep=1, world=world)
        except TrainyardError as error:
            return str(error), error.exit_code, error.is_shared
    raise AssertionError("it was saved")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk(rank: int, tmp_path: Path) -> None:
    for said, code, is_shared in spawn(save_on_a_full_disk, 2, tmp_path, rank):
        assert "step-00000000: File too large: " in said and " MB needed, " in said
        assert (code, is_shared) == (1, True)
    assert list(tmp_path.iterdir()) == []


# --- damage ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of four ranks."""
    folder = tmp_path_factory.mktemp("four")
    spawn(begin, 4, folder, "adamw")
    return folder / "step-00000002"


def test_a_damaged_shard_is_found(checkpoint: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "step-00000002"))
    assert find_problem(path) is None
    shards = sorted(name for name in os.listdir(path / "sharded"))
    assert shards == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
    for name in shards:
        file = path / "sharded" / name
        before = file.read_bytes()
        file.write_bytes(before[:-50] + bytes(50))
        assert f"sharded/{name} is truncated or altered" in str(find_problem(path))
        file.unlink()
        assert f"{name} is missing" in str(find_problem(path))
        file.write_bytes(before)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil-was-here",)


def test_nothing_but_tensors_is_unpickled(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(shutil.copytree(checkpoint, tmp_path / "step-00000002"))
    (path / "sharded" / ".metadata").write_bytes(pickle.dumps(Evil()))
    state = state_of(World(), "adamw")
    with pytest.raises(CheckpointError, match=r"cannot be read: .metadata names posix.mkdir"):
        read_shards(path, state.model, state.emas, state.optimizer)
    assert not Path("evil-was-here").exists()


def test_another_model_is_refused(checkpoint: Path) -> None:
    state = state_of(World(), "adamw")
    state.model = torch.nn.Linear(3, 3)
    with pytest.raises(CheckpointError, match=r"do not fit the model: model.bias is only in"):
        read_shards(checkpoint, state.model, state.emas, state.optimizer)
