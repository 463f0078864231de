"""The promises of every averager: consensus, and runs that go on as if nothing had been."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from tests.data.batches import batch_of_images
from tests.spawn import spawn
from tests.steps import (
    CPU,
    build_state,
    make_step,
    save_checkpoint,
    whole_weights,
)
from trainyard.averaging.config import AverageConfig
from trainyard.config import load_recipe
from trainyard.data.batch import Batch
from trainyard.model.ema import Ema
from trainyard.model.freeze import freeze
from trainyard.run.build import build_averager
from trainyard.training.checkpoint import load_checkpoint
from trainyard.training.update import DynamicLossScale
from trainyard.world import World

pytestmark = pytest.mark.slow

Arrays = dict[str, NDArray[Any]]
NUM_RANKS, NUM_STEPS = 3, 9
STOPS = (4, 6)  # in the midst of a period of three steps, and after its last one
PERIODIC: dict[str, Any] = {"name": "periodic", "every": 3}
WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "bf16": {"compress": "bf16"},
    "sharded": {"name": "sharded"},
    "gossip": {"name": "gossip", "topology": "ring"},
    "gossip, bf16": {"name": "gossip", "topology": "complete", "compress": "bf16"},
    "gossip, no overlap": {"name": "gossip", "topology": "ring", "overlap": False},
    "periodic": PERIODIC,
    "DiLoCo": PERIODIC | {"outer_lr": 0.7, "outer_momentum": 0.9},
}


def model_of(seed: int) -> nn.Module:
    """With batch norms, a frozen one too, and two of DDP's buckets: the first takes a megabyte."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Flatten(), nn.BatchNorm1d(48)),
        *(nn.Linear(48, 400), nn.BatchNorm1d(400), nn.Tanh()),
        *(nn.Linear(400, 700), nn.Linear(700, 10)),
    )
    freeze(model, ["1.*"])
    return model


def batch_of(world: World, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step * world.size + world.rank)
    labels = torch.randint(10, (4,), generator=generator)
    return batch_of_images(torch.randn(4, 3, 4, 4, generator=generator) + 0.3 * world.rank, labels)


def values(module: nn.Module) -> Tensor:
    """All floats that this rank holds of a module."""
    own = [t.to_local() if isinstance(t, DTensor) else t for t in module.state_dict().values()]
    return torch.cat([tensor.flatten() for tensor in own if tensor.is_floating_point()])


class Process:
    """One process of a run; another process takes over its checkpoint alone."""

    def __init__(self, world: World, way: str) -> None:
        self.world, self.model = world, model_of(world.rank)  # made alike nevertheless
        config = load_recipe("debug").model_copy(update={"average": AverageConfig(**WAYS[way])})
        averager = build_averager(config, world, CPU)
        self.ema = Ema(self.model, {"ema": 0.5}, warmup=False, cpu=False)
        self.step: Any = make_step(self.model, averager, world, update_ema=self.ema.update)
        averager.register_emas(self.ema.modules)
        optimizer = self.step.update._optimizer
        # A scale that grows: each replica has its own.
        self.scale = DynamicLossScale(CPU, 2.0**averager.replica.number, interval=3)
        self.step.update._scale = self.scale
        emas = self.ema.modules
        self.state = build_state(self.model, optimizer, averager, emas=emas, scale=self.scale)

    def run(self, end: int) -> Tensor:
        for number in range(self.state.step, end):
            self.step(batch_of(self.world, number), number, None)
        self.state.step = end
        return self.both()

    def both(self) -> Tensor:
        scale = self.scale.value.view(1)
        return torch.cat([values(self.model), values(self.ema.modules["ema"]), scale])

    def whole(self) -> Arrays:
        modules = {"model": self.model, "ema": self.ema.modules["ema"]}
        return {
            f"{kind}.{name}": tensor.numpy().copy()
            for kind, module in modules.items()
            for name, tensor in whole_weights(module).items()
        }

    def save(self, folder: Path) -> Path:
        with self.state.averager.consensus():
            return save_checkpoint(self.state, folder, world=self.world)


class Ends(NamedTuple):
    equal: dict[str, bool]
    note: str | None
    own: Arrays  # at the last stop
    consensus: Arrays
    distance: float | None


def stop_and_go_on(world: World, folder: Path) -> dict[str, Ends]:
    torch.set_num_threads(1)
    return {way: _stop_and_go_on(world, folder / way, way) for way in WAYS}


def _stop_and_go_on(world: World, folder: Path, way: str) -> Ends:
    equal, process = {}, Process(world, way)
    averager = process.state.averager
    for stop in STOPS:
        before = process.run(stop)
        own = process.whole()
        path = process.save(folder)
        equal[f"unchanged at {stop}"] = torch.equal(process.both(), before)
        with averager.consensus():
            consensus = process.whole()
        expected = process.run(NUM_STEPS)
        load_checkpoint(process.state, path)  # while another exchange is under way
        equal[f"back from {NUM_STEPS} to {stop}"] = torch.equal(process.run(NUM_STEPS), expected)
        fresh = Process(world, way)
        note = load_checkpoint(fresh.state, path)
        equal[f"anew from {stop}"] = torch.equal(fresh.run(NUM_STEPS), expected)
        load_checkpoint(process.state, path)
    return Ends(equal, note, own, consensus, averager.metrics().get("consensus_distance"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Ends]]:
    return spawn(stop_and_go_on, NUM_RANKS, folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(
    way: str, ranks: list[dict[str, Ends]]
) -> None:
    """In the process that went too far, and in a new one."""
    for rank in ranks:
        assert rank[way].note is None
        assert all(rank[way].equal.values()), rank[way].equal


@pytest.mark.parametrize("way", WAYS)
def test_consensus_is_the_mean(way: str, ranks: list[dict[str, Ends]]) -> None:
    """The weights, batch norm statistics and moving average on all ranks are the mean."""
    first = ranks[0][way]
    for key, found in first.consensus.items():
        own = [rank[way].own[key] for rank in ranks]
        for rank in ranks:
            np.testing.assert_array_equal(rank[way].consensus[key], found, key)
        if found.dtype != np.float32:
            continue
        np.testing.assert_allclose(found, np.mean(own, axis=0), rtol=1e-4, atol=1e-6, err_msg=key)
        if ".1." in key:  # it is frozen
            assert all(np.array_equal(each, found) for each in own), key
        elif "running" in key:  # of its own samples where replicas differ
            assert np.array_equal(own[0], own[1]) == (first.distance is None)
    trained = [key for key in first.own if key.startswith("model.") and "running" not in key]
    apart = [
        sum(np.sum((rank[way].own[key] - first.consensus[key]) ** 2) for key in trained)
        for rank in ranks
    ]
    if first.distance is not None:
        assert first.distance == pytest.approx(np.mean(apart) ** 0.5, rel=1e-3, abs=1e-6)
    if "gossip" in way:
        assert first.distance and first.distance > 1e-3


# --- another number of ranks ---

SAME_EVERYWHERE = ("all-reduce", "bf16", "sharded")


def go_on_from(world: World, folder: Path) -> dict[str, tuple[str | None, Arrays, bool, bool]]:
    """The note, what is loaded, whether momentum is, and whether the run goes on."""
    torch.set_num_threads(1)
    found = {}
    for way in WAYS:
        process = Process(world, way)
        note = load_checkpoint(process.state, folder / way / f"step-{STOPS[-1]:08d}")
        loaded, moments = process.whole(), len(process.state.optimizer.state) > 0
        found[way] = note, loaded, moments, bool(process.run(NUM_STEPS).isfinite().all())
    return found


@pytest.fixture(scope="module", params=[2, 1])
def fewer(
    request: pytest.FixtureRequest, folder: Path, ranks: list[dict[str, Ends]]
) -> list[dict[str, tuple[str | None, Arrays, bool, bool]]]:
    if request.param == 1:
        return [go_on_from(World(), folder)]
    return spawn(go_on_from, request.param, folder)


@pytest.mark.parametrize("way", WAYS)
def test_another_number_of_ranks_goes_on_from_the_consensus(
    way: str, fewer: list[Any], ranks: list[dict[str, Ends]]
) -> None:
    expected = f"{NUM_RANKS} replicas were saved and {len(fewer)} go on: all from their mean"
    for rank in fewer:
        note, loaded, has_momentum, goes_on = rank[way]
        assert note is None if way in SAME_EVERYWHERE else note.startswith(expected)
        assert loaded.keys() == ranks[0][way].consensus.keys()
        for key, value in ranks[0][way].consensus.items():
            np.testing.assert_allclose(loaded[key], value, rtol=1e-6, atol=1e-7, err_msg=key)
        assert goes_on
        assert has_momentum


def test_only_replicas_that_differ_have_files_of_their_own(
    folder: Path, ranks: list[dict[str, Ends]]
) -> None:
    for way in WAYS:
        files = list((folder / way).glob("step-*/replicas/*.pt"))
        assert len(files) == (0 if way in SAME_EVERYWHERE else NUM_RANKS)


# --- ranks without samples ---


def without_samples(world: World) -> dict[str, list[NDArray[Any]]]:
    """By way, the statistics before and after a step in which rank 0 has only padding, and after
    one in which all have."""
    torch.set_num_threads(1)
    return {way: list(_without_samples(world, way)) for way in WAYS}


def _without_samples(world: World, way: str) -> Iterator[NDArray[Any]]:
    process = Process(world, way)
    process.run(2)
    for step, empty in enumerate([(), (0,), (0, 1)], start=2):
        batch = batch_of(world, step)
        if world.rank in empty:
            images, weights = (torch.zeros_like(of) for of in (batch.images_BCHW, batch.weights))
            batch = replace(batch, images_BCHW=images, weights=weights)
        process.step(batch, step, None)
        norm = process.model.get_submodule("3")
        yield np.concatenate([buffer.numpy() for buffer in norm.buffers() if buffer.ndim])


def test_padding_spoils_no_statistics() -> None:
    """A rank without samples takes the mean of all ranks. It keeps its own where none is shared."""
    first, second = spawn(without_samples, 2)
    for way in WAYS:
        (before, after, end), (_, other, _) = first[way], second[way]
        is_shared = way in SAME_EVERYWHERE
        np.testing.assert_array_equal(after, other if is_shared else before)
        assert np.array_equal(after, other) == is_shared, way
        assert not np.array_equal(other, before), way
        np.testing.assert_array_equal(end, after)


# --- what is sent ---


def count_messages(world: World) -> int:
    torch.set_num_threads(1)
    process, sent, all_reduce = Process(world, "all-reduce"), [], dist.all_reduce
    running = [value for name, value in process.model.named_buffers() if "running" in name]

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counted
    process.run(3)
    return sent.count(1 + sum(value.numel() for value in running))


def test_statistics_go_in_one_message_a_step() -> None:
    assert spawn(count_messages, 2) == [3, 3]
