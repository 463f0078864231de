"""Virtual ranks: the same bits on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.cuts import Killed, cut
from tests.errors import raises
from tests.runs import assert_same_end, recipe, train
from tests.spawn import spawn
from trainyard.averaging.virtual_ranks import VirtualRanks, tree_sum, turns
from trainyard.config import RunConfig
from trainyard.run.build import build_run_course, check_batches
from trainyard.training.buffers import Buffers
from trainyard.world import World

TOTAL, EACH = 8, 2  # virtual ranks, and samples of each
SIZES = (1, 2, 4, 8)
Arrays = dict[str, NDArray[Any]]


def model_of() -> nn.Module:
    """With batch norm, two of DDP's buckets, and weights that lie with channels last."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(32, 700), nn.Linear(700, 700), nn.Linear(700, 5))
    return model.to(memory_format=torch.channels_last)


def images_of(step: int) -> Tensor:
    """For all virtual ranks."""
    return torch.randn(TOTAL, EACH, 3, 4, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    loss: Tensor = model(images_BCHW.to(memory_format=torch.channels_last)).square().sum()
    return loss


def trained(world: World) -> list[Arrays]:
    """Gradients and buffers after each of some steps."""
    torch.set_num_threads(1)
    model = model_of()
    averager, buffers, found = VirtualRanks(TOTAL, world), Buffers(model), []
    wrapped = averager.wrap(model)
    for step in range(3):
        divisor = averager.divisor(torch.tensor(float(EACH * len(averager.own))))
        buffers.remember()
        for turn, number in enumerate(turns(len(averager.own))):
            buffers.restore()
            with averager.passes_of(turn, torch.tensor(float(EACH))):
                loss = loss_of(wrapped, images_of(step)[averager.own[number]])
                (loss / divisor()).backward()  # type: ignore[no-untyped-call]
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        tensors = {**grads, **dict(model.named_buffers())}
        found.append({name: tensor.numpy().copy() for name, tensor in tensors.items()})
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=1e-3)
            parameter.grad = None
    return found


def plain() -> dict[str, Tensor]:
    """The first step without averager: each virtual rank from the same buffers, then the tree."""
    torch.set_num_threads(1)
    model, grads, statistics = model_of(), [], []
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for images_BCHW in images_of(0):
        model.load_state_dict(before, strict=False)
        model.zero_grad()
        (loss_of(model, images_BCHW) / (TOTAL * EACH)).backward()  # type: ignore[no-untyped-call]
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        statistics.append({name: b.clone().double() for name, b in model.named_buffers()})
    found = {name: tree_sum(torch.stack([g[name] for g in grads])) for name in grads[0]}
    means = {name: tree_sum(torch.stack([s[name] for s in statistics])) / TOTAL for name in before}
    return {**found, **{name: mean.to(before[name].dtype) for name, mean in means.items()}}


@pytest.mark.parametrize("size", [2, 8])
def test_gradients_and_statistics(size: int) -> None:
    alone, expected = trained(World()), plain()
    for ours in spawn(trained, size):
        for step, tensors in enumerate(ours):
            for name, tensor in tensors.items():
                assert np.array_equal(tensor, alone[step][name]), (step, name)
    for name, tensor in expected.items():
        assert np.array_equal(alone[0][name], tensor.numpy()), name


def test_the_order_of_passes_is_that_of_the_tree() -> None:
    assert turns(1) == [0]
    assert turns(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    parts = torch.randn(8, 100)
    pairs = [parts[a] + parts[b] for a, b in zip(turns(8)[::2], turns(8)[1::2], strict=True)]
    fours = [pairs[0] + pairs[1], pairs[2] + pairs[3]]
    assert torch.equal(tree_sum(parts), fours[0] + fours[1])


# --- whole runs ---

MIXED = {
    "augment.mixup": "0.2",
    "augment.cutmix": "1.0",
    "augment.erasing": "0.25",
    "augment.randaugment": "rand-m9-mstd0.5-inc1",
}
RUNS: dict[str, dict[str, str]] = {
    "batch norm, SGD": {"model.name": "test_resnet", "optim.name": "sgd", "optim.lr": "0.1"},
    "LAMB, mixing": {"model.name": "test_resnet", "optim.name": "lamb", "optim.clip_norm": "1.0"}
    | MIXED,
    "ConvNeXt, AdamW, moving average": {
        "model.name": "test_convnext",
        "optim.name": "adamw",
        "model.drop_path": "0.1",
        "model.ema_decay": "0.99",
    },
    "ViT, dropout, micro-batches, bf16": {
        "model.name": "test_vit",
        "model.options": "{drop_rate = 0.1}",
        "model.drop_path": "0.1",
        "batch.micro": "4",
        "batch.precision": "bf16",
    },
}
VIRTUAL = {"batch.virtual_ranks": f"{TOTAL}"}


@pytest.mark.night
@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, digits: Path, tmp_path: Path) -> None:
    """Weights, moments, moving averages, evaluations and reported losses."""
    config = recipe(digits, VIRTUAL, RUNS[name])
    for size in SIZES:
        spawn(train, size, config, tmp_path / f"{size}")
        assert_same_end(tmp_path / f"{size}", tmp_path / "1")


@pytest.mark.night
def test_compiled_runs(digits: Path, tmp_path: Path) -> None:
    """DDP's pieces would round otherwise than the whole model of a single rank."""
    kinds = RUNS["ViT, dropout, micro-batches, bf16"] | MIXED | {"model.ema_decay": "0.99"}
    config = recipe(digits, VIRTUAL, kinds, {"model.compile": "default"})
    for size in (1, 2, 4):
        spawn(train, size, config, tmp_path / f"{size}", timeout_s=900)
        assert_same_end(tmp_path / f"{size}", tmp_path / "1")


def train_and_be_killed(world: World, config: RunConfig, folder: Path, updates: int) -> None:
    with cut("killed in a step", updates), pytest.raises(Killed):
        train(world, config, folder)


@pytest.mark.slow
def test_other_numbers_of_ranks_after_kills(digits: Path, tmp_path: Path) -> None:
    """An epoch ends in step 23: both kills come in the midst of the first one."""
    config = recipe(digits, VIRTUAL, RUNS["LAMB, mixing"], {"run.save_every": "3 steps"})
    spawn(train, 1, config, tmp_path / "undisturbed")
    folder = tmp_path / "run"
    for size, updates in ((1, 8), (4, 9)):
        spawn(train_and_be_killed, size, config, folder, updates)
    spawn(train, 2, config, folder)
    assert_same_end(folder, tmp_path / "undisturbed")


# --- recipes ---


def test_ranks_that_cannot_share(digits: Path) -> None:
    config = recipe(digits, VIRTUAL)
    with raises("recipe.virtual-ranks-not-shared", value=8, num_ranks=3):
        check_batches(config, build_run_course(config, 1433), World(size=3))
    config = recipe(digits, VIRTUAL, {"batch.size": "68"})
    with raises("recipe.batch-not-multiple", key="batch.size", value=68):
        check_batches(config, build_run_course(config, 1433), World(size=2))


@pytest.mark.parametrize(
    "change",
    [
        {"average.name": "gossip"},
        {"average.compress": "bf16"},
        {"average.batch_norm": "sync"},
        {"run.bn_samples": "64"},
        {"model.compile": "max-autotune"},
    ],
)
def test_keys_that_contradict(change: dict[str, str], digits: Path) -> None:
    with raises("recipe.keys-conflict", other="batch.virtual_ranks"):
        recipe(digits, VIRTUAL, change)


def test_the_number_is_a_power_of_two(digits: Path) -> None:
    with raises("recipe.invalid-value", key="batch.virtual_ranks", value=6):
        recipe(digits, VIRTUAL, {"batch.virtual_ranks": "6"})
