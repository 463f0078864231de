"""A model of which each rank keeps a part takes the steps that all-reduce takes."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.errors import raises
from tests.gpus import pretend
from tests.spawn import spawn
from tests.steps import CPU, build_update, global_batch, make_step, share_of, whole_weights
from tests.steps import Case as Steps
from trainyard.averaging import sharded
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.base import Averager
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.sharded import Sharded, blocks
from trainyard.config import load_recipe
from trainyard.data.batch import Batch
from trainyard.model.ema import Ema
from trainyard.optim.config import OptimConfig
from trainyard.optim.optimizers import build_optimizer
from trainyard.training.bn_statistics import estimate_statistics
from trainyard.training.evaluate import Evaluator, Views
from trainyard.training.step import TrainStep
from trainyard.training.update import DynamicLossScale, clip_by_norm, no_clip
from trainyard.world import World

pytestmark = pytest.mark.slow

SHARDED = partial(Sharded, device=CPU)
NUM_STEPS, NUM_RANKS = 3, 3


class Case(NamedTuple):
    model: str = "test_vit"
    optimizer: str = "sgd"
    micro: int | None = None
    clip: float | None = None
    frozen: str = "none"
    autocast: torch.dtype | None = None
    accumulate: str | None = None
    dtype: torch.dtype = torch.float32
    bad: tuple[int, ...] = ()


CASES = {
    "micro-batches, clipped": Case(micro=2, clip=0.1, bad=(1, 2, 8)),
    "micro-batches in parts": Case(micro=2, accumulate="parts"),
    "frozen in part": Case(frozen="blocks.0", optimizer="adamw"),
    # Over three images its backward pass would make much of the order of sums in single precision.
    "batch norm": Case(model="test_resnet", dtype=torch.float64),
    "bf16": Case(autocast=torch.bfloat16),
    "fp16": Case(autocast=torch.float16),
}
ROUGH = {"bf16": 0.02, "fp16": 0.005}


def batch_of(step: int, world: World, size: int = 10, bad: tuple[int, ...] = ()) -> Batch:
    whole = global_batch(Steps(size, bad=bad), step)
    labels = whole.labels % 5
    return share_of(replace(whole, labels=labels, mixed_labels=labels), world)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    size: dict[str, Any] = {"img_size": 32} if name == "test_vit" else {}
    model: nn.Module = timm.create_model(name, num_classes=5, **size)
    return model.to(memory_format=torch.channels_last)


def step_of(model: nn.Module, averager: Averager, ema: Ema, case: Case, world: World) -> TrainStep:
    taken = Steps(micro=case.micro, autocast=case.autocast)
    step = make_step(model, averager, world, case=taken, update_ema=ema.update)
    averager.register_emas(ema.modules)
    # In single precision the update of Adam-like optimizers depends on the order of sums where a
    # gradient all but vanishes.
    keys = {"name": case.optimizer, "lr": 0.05} | ({} if case.optimizer == "sgd" else {"eps": 1e-3})
    config = OptimConfig.model_validate(keys)
    is_fp16 = case.autocast == torch.float16
    update = build_update(
        model,
        build_optimizer(model, config),
        DynamicLossScale(CPU, 2.0**8) if is_fp16 else None,
        clip=no_clip if case.clip is None else clip_by_norm(case.clip),
    )
    return replace(step, update=update)


Trained = tuple[list[list[float]], dict[str, NDArray[Any]]]


def train(world: World, case: Case, *, is_sharded: bool) -> Trained:
    """Figures of each step, and all weights and averages in the end."""
    model = model_of(case.model).to(case.dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(case.frozen))
    ema = Ema(model, {"ema": 0.5}, warmup=False, cpu=False)
    averager: Averager = AllReduce(AverageConfig(), world)
    if is_sharded:
        keys = {"name": "sharded", "accumulate": case.accumulate}
        averager = Sharded(AverageConfig.model_validate(keys), world, CPU, case.autocast)
    step = step_of(model, averager, ema, case, world)
    figures = []
    for number in range(NUM_STEPS):
        batch = batch_of(number, world, bad=case.bad)
        batch = replace(batch, images_BCHW=batch.images_BCHW.to(case.dtype))
        stats = step(batch, number, None)
        found = (stats.loss_sum, stats.grad_norm, stats.skipped)
        figures.append([float(value) for value in found])
    with averager.consensus():
        weights = {
            f"{kind}.{name}": tensor.numpy()
            for kind, module in (("model", model), ("ema", ema.modules["ema"]))
            for name, tensor in whole_weights(module).items()
        }
    return figures, weights


def train_all(world: World) -> dict[str, tuple[Trained, Trained]]:
    torch.set_num_threads(1)
    return {
        name: (train(world, case, is_sharded=False), train(world, case, is_sharded=True))
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Trained, Trained]]]:
    return spawn(train_all, NUM_RANKS)


@pytest.mark.parametrize("name", CASES)
def test_the_same_steps_as_all_reduce(
    name: str, ranks: list[dict[str, tuple[Trained, Trained]]]
) -> None:
    tolerance = ROUGH.get(name, 1e-5)
    for rank in ranks:
        (figures, weights), (our_figures, our_weights) = rank[name]
        np.testing.assert_allclose(our_figures, figures, rtol=10 * tolerance, atol=1e-6)
        assert our_weights.keys() == weights.keys()
        for key, value in weights.items():
            np.testing.assert_allclose(
                our_weights[key], value, rtol=tolerance, atol=tolerance, err_msg=key
            )
        for key, value in ranks[0][name][1][1].items():
            np.testing.assert_array_equal(our_weights[key], value)


# --- what is sent ---


def count_sent(world: World, accumulate: str | None, precision: torch.dtype | None) -> list[int]:
    """Reduce-scatters of a step of three micro-batches, and bytes of its largest all-gather."""
    torch.set_num_threads(1)
    model = model_of("test_vit")
    config = AverageConfig.model_validate({"name": "sharded", "accumulate": accumulate})
    averager = Sharded(config, world, CPU, precision)
    ema = Ema(model, {"ema": 0.5}, warmup=False, cpu=False)
    step = step_of(model, averager, ema, Case(micro=2, autocast=precision), world)
    sent: dict[Any, list[int]] = {DefaultReduceScatter: [], DefaultAllGather: []}
    with pytest.MonkeyPatch.context() as patch:
        for kind, sizes in sent.items():
            real = kind.__call__

            def noted(*args: Any, sizes: list[int] = sizes, real: Any = real, **named: Any) -> Any:
                tensors = [t for t in (*args, *named.values()) if torch.is_tensor(t)]
                sizes.append(max(tensor.nbytes for tensor in tensors))
                return real(*args, **named)

            patch.setattr(kind, "__call__", noted)
        step(batch_of(0, world), 0, None)
    return [len(sent[DefaultReduceScatter]), max(sent[DefaultAllGather])]


def count_sent_in_all_ways(world: World) -> list[list[int]]:
    ways = ((None, None), ("parts", None), (None, torch.bfloat16))
    return [count_sent(world, *way) for way in ways]


def test_gradients_are_sent_once_a_step() -> None:
    """And not after each micro-batch, unless they are added in parts."""
    one, other = spawn(count_sent_in_all_ways, 2)
    (whole, largest), (parts, _), (_, half) = one
    also_whole = other[0][0]
    assert whole == also_whole == len(blocks(model_of("test_vit"))) + 1
    assert parts == 3 * whole
    assert 0.5 * largest <= half < 0.55 * largest  # norms are gathered in single precision


# --- optimizers ---


def update_twice(world: World, kind: Any, optimizer: str) -> dict[str, Tensor]:
    """In double precision: sums in another order then differ by next to nothing."""
    torch.manual_seed(0)
    hidden = nn.Linear(4, 7), nn.Linear(7, 6)  # 7 rows: shares are not alike
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *hidden)
    averager = kind(AverageConfig(), world)
    wrapped = averager.wrap(model)
    keys = {"name": optimizer, "lr": 0.01} | ({"accum_iter": 2} if "accum" in optimizer else {})
    config = OptimConfig.model_validate(keys)
    update = build_update(model, build_optimizer(model, config), clip=clip_by_norm(1.0))
    for step in range(3):
        images = batch_of(step, world).images_BCHW.double()
        wrapped(images).square().mean().backward()
        update(step)
    return whole_weights(model)


OPTIMIZERS = [
    *("sgd", "adam", "adamw", "lamb", "lars", "lion", "muon", "accum_adam", "accum_adamw"),
    *("schedule_free_sgd", "schedule_free_adamw"),
]


def furthest(world: World) -> dict[str, float]:
    """By optimizer, the largest difference from all-reduce in any weight."""
    import timm.optim.muon

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    precise: Any = timm.optim.muon.zeropower_via_newtonschulz
    precise.__defaults__ = tuple(
        torch.float64 if value is torch.bfloat16 else value for value in precise.__defaults__
    )
    found = {}
    for name in OPTIMIZERS:
        theirs, ours = (update_twice(world, kind, name) for kind in (AllReduce, SHARDED))
        found[name] = max(float((ours[key] - value).abs().max()) for key, value in theirs.items())
    return found


def test_every_optimizer_sees_whole_tensors() -> None:
    """Norms of LAMB and LARS are of a whole layer, and Muon's products of whole matrices."""
    for found in spawn(furthest, 2):
        assert max(found.values()) < 1e-9


# --- what takes all ranks ---


share = partial(batch_of, 9)


def judge(world: World) -> tuple[list[Any], int, list[Any], bool]:
    """One image for the ranks to evaluate and four for statistics: some have none, or one."""
    torch.set_num_threads(1)
    model = model_of("test_resnet")
    averager = SHARDED(AverageConfig(), world)
    averager.wrap(model)
    with averager.consensus():
        images = estimate_statistics([model], [share(world, 12), share(world, 4)], world=world)
        evaluator = Evaluator(num_samples=1, world=world, device=CPU, views=Views(True))
        said = evaluator.predictions({"": model}, [share(world, 1)])
    statistics = whole_weights(model)["bn1.running_var"]
    is_whole = any(not isinstance(parameter, DTensor) for parameter in model.parameters())
    return (
        [said[""].loss.tolist(), said[""].rank_of_truth.tolist()],
        images,
        statistics.tolist(),
        is_whole,
    )


def test_ranks_without_images_take_part() -> None:
    results = spawn(judge, NUM_RANKS)
    model = model_of("test_resnet")
    alone = World()
    shares = [share(World(rank=rank, size=NUM_RANKS), 12) for rank in range(NUM_RANKS)]
    shares.append(share(World(rank=0, size=NUM_RANKS), 4))  # the other shares are of one image
    assert estimate_statistics([model], shares, world=alone) == 14
    evaluator = Evaluator(num_samples=1, world=alone, device=CPU, views=Views(True))
    said = evaluator.predictions({"": model}, [share(alone, 1)])
    for (losses, places), images, statistics, is_whole in results:
        assert images == 14
        assert losses == pytest.approx(said[""].loss.tolist(), rel=1e-4)
        assert places == said[""].rank_of_truth.tolist()
        running = model.state_dict()["bn1.running_var"]
        assert statistics == pytest.approx(running.tolist(), rel=1e-4)
        assert not is_whole  # afterwards


class OutOfMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 32 * 32, 5)

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > 2:
            raise torch.OutOfMemoryError("out of memory")
        logits: Tensor = self.linear(images.flatten(1))
        return logits


def run_out(world: World) -> None:
    torch.set_num_threads(1)
    model = OutOfMemory()
    averager = SHARDED(AverageConfig(), world)
    ema = Ema(model, {"ema": 0.5}, warmup=False, cpu=False)
    step = step_of(model, averager, ema, Case(), world)
    with raises("memory.micro-batch-too-large", num_samples=5):
        step(batch_of(0, world), 0, None)


def test_out_of_memory_is_named_on_each_rank() -> None:
    spawn(run_out, 2)


# --- devices ---


def test_weights_go_to_the_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the one that torch's FSDP takes for the mesh that it is given."""
    pretend(monkeypatch, 2)
    torch.cuda.set_device(torch.device("cuda", 1))
    taken = []

    def shard(module: nn.Module, *, mesh: DeviceMesh, mp_policy: object) -> None:
        taken.append((module, _get_device_from_mesh(mesh), mesh.get_group()))

    monkeypatch.setattr(sharded, "fully_shard", shard)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        Sharded(AverageConfig(), World(rank=1, size=2), torch.device("cuda", 1)).wrap(model)
        device, everyone = torch.device("cuda", 1), dist.group.WORLD
        assert taken == [(module, device, everyone) for module in (model[1], model[0], model)]
    finally:
        dist.destroy_process_group()


# --- which parts ---


@pytest.mark.parametrize(
    "name, number, kind",
    [
        ("vit_tiny_patch16_224", 12, "Block"),
        ("resnet50", 16, "Bottleneck"),
        ("convnext_tiny", 18, "ConvNeXtBlock"),
        ("swin_tiny_patch4_window7_224", 12, "SwinTransformerBlock"),
        ("efficientnet_b0", 15, "InvertedResidual"),
    ],
)
def test_blocks_are_what_a_model_repeats(name: str, number: int, kind: str) -> None:
    with torch.device("meta"):
        model: Any = timm.create_model(name)
    found = blocks(model)
    assert sum(type(block).__name__ == kind for block in found) == number
    inside = {id(p) for block in found for p in block.parameters()}
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    classifier: Any = model.get_classifier()
    largest = sum(p.numel() for p in classifier.parameters())
    assert outside < largest + 0.15 * sum(p.numel() for p in model.parameters())


REFUSED = {
    "model.compile": "reduce-overhead",
    "model.ema_cpu": "true",
    "optim.compile": "true",
    "optim.clip_agc": "0.01",
}


@pytest.mark.quick
@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_do_not_go_with_it(key: str) -> None:
    more = {"model.ema_decay": "0.9"} if key == "model.ema_cpu" else {}
    with raises("recipe.keys-conflict") as caught:
        load_recipe("debug", {"average.name": "sharded", key: REFUSED[key], **more})
    both = str(caught.value.fields["setting"]) + str(caught.value.fields["other"])
    assert key in both and "average.name = 'sharded'" in both
