"""Periodic averaging beside a calculation in one process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import vector_to_parameters
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.averaging.test_quantize import plain_mean
from tests.spawn import spawn
from tests.steps import flat
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.base import Averager
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.periodic import Periodic
from trainyard.world import World

Array = np.ndarray[Any, Any]
EVERY, STEPS = 3, 16  # five periods, and a step of a sixth
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DiLoCo": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "overlap": {"overlap": True},
    "DiLoCo, overlap": {"outer_lr": 0.7, "outer_momentum": 0.9, "overlap": True},
    "bf16": {"compress": "bf16", "outer_momentum": 0.5},
    "int8": {"compress": "int8", "outer_lr": 0.7, "outer_momentum": 0.9},
    "int8, overlap": {"compress": "int8", "overlap": True, "outer_momentum": 0.5},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


def config_of(**options: Any) -> AverageConfig:
    return AverageConfig(name="periodic", every=EVERY, **options)


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The sum over eight samples."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples = torch.randn(8, 9, generator=generator, dtype=torch.float64)
    loss: Tensor = (model(samples[:, :6]) - samples[:, 6:]).square().sum()
    return loss


def train(
    averager: Averager, wrapped: nn.Module, optimizer: Any, rank: int, steps: range
) -> list[Tensor]:
    """What the weights are after each step."""
    trace = []
    for step in steps:
        divisor = averager.divisor(torch.tensor(8.0))
        (loss_of(wrapped, step, rank) / divisor()).backward()  # type: ignore[no-untyped-call]
        for _ in averager.ready_parameters(step, False):
            optimizer.step()
            optimizer.zero_grad()
        trace.append(flat(wrapped))
    return trace


# --- the rule, written out ---


def expected(num_replicas: int, optimizer: str, options: dict[str, Any]) -> Array:
    """weights[replica, step, …], of the rule in the docstring of Periodic."""
    lr, momentum = options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0)
    models = [fresh() for _ in range(num_replicas)]
    inner = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    anchor = flat(models[0])
    velocity = torch.zeros_like(anchor)
    starts, under_way, trace = [anchor] * num_replicas, None, []
    for step in range(STEPS):
        for rank, model in enumerate(models):
            (loss_of(model, step, rank) / 8).backward()  # type: ignore[no-untyped-call]
            inner[rank].step()
            inner[rank].zero_grad()
        if step % EVERY == EVERY - 1:
            moved = [start - flat(model) for start, model in zip(starts, models, strict=True)]
            arrived = mean_of(moved, options.get("compress"))
            if options.get("overlap"):
                arrived, under_way = under_way, arrived
            if arrived is not None:
                velocity = momentum * velocity + arrived
                anchor = anchor - lr * (arrived + momentum * velocity)
            starts = (
                [anchor - d for d in moved] if options.get("overlap") else [anchor] * len(moved)
            )
            for model, start in zip(models, starts, strict=True):
                vector_to_parameters(start.clone(), model.parameters())
        trace.append(torch.stack([flat(model) for model in models]))
    return torch.stack(trace, dim=1).numpy()


def mean_of(moved: list[Tensor], compress: str | None) -> Tensor | None:
    if compress is None:
        return torch.stack(moved).mean(dim=0)
    return torch.from_numpy(plain_mean(compress, [d.float().numpy() for d in moved])).double()


def train_all_ways(world: World, optimizer: str) -> dict[str, Array]:
    torch.set_num_threads(1)
    return {
        way: train_one_way(world, config_of(**options), OPTIMIZERS[optimizer])
        for way, options in WAYS.items()
    }


def train_one_way(
    world: World, config: AverageConfig, optimizer_of: Callable[[Any], torch.optim.Optimizer]
) -> Array:
    """weights[step, …] of this rank, which looks at the consensus after one step in four."""
    averager, model = Periodic(config, world), fresh()
    parts = averager, averager.wrap(model), optimizer_of(model.parameters()), world.rank
    trace = []
    for step in range(STEPS):
        trace += train(*parts, range(step, step + 1))
        if step % 4 == 0:
            with averager.consensus():
                pass
    return torch.stack(trace).numpy()


@pytest.mark.parametrize(("size", "optimizer"), [(2, "adamw"), (4, "sgd")])
def test_the_rule(size: int, optimizer: str) -> None:
    """For five periods, to rounding in fp64."""
    ranks = spawn(train_all_ways, size, optimizer)
    for way, options in WAYS.items():
        ours = np.stack([found[way] for found in ranks])
        error = float(np.abs(ours - expected(size, optimizer, options)).max())
        assert error < 1e-12
        assert float(np.abs(ours[0, -1] - ours[0, 0]).max()) > 0.01
        ends = ours[:, EVERY - 1 :: EVERY]
        assert (ends == ends[0]).all() == ("overlap" not in options)
        assert not np.array_equal(ours[0, -1], ours[1, -1])


# --- in every step, and by nodes ---


def beside_all_reduce(world: World) -> list[float]:
    """How far one is from the other, after each step."""
    torch.set_num_threads(1)
    config = AverageConfig(name="periodic", every=1)
    traces = []
    for averager in (Periodic(config, world), AllReduce(AverageConfig(), world)):
        model = fresh()
        wrapped = averager.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        traces.append(train(averager, wrapped, optimizer, world.rank, range(10)))
    return [float((one - other).abs().max()) for one, other in zip(*traces, strict=True)]


def test_plain_sgd_averaged_in_every_step_is_all_reduce() -> None:
    for differences in spawn(beside_all_reduce, 2):
        assert max(differences) < 1e-14


def train_in_nodes(world: World, options: dict[str, Any]) -> tuple[Array, float]:
    torch.set_num_threads(1)
    node, local = divmod(world.rank, 2)
    world = replace(world, node=node, num_nodes=2, local_rank=local, local_size=2)
    averager, model = Periodic(config_of(hierarchical=True, **options), world), fresh()
    wrapped = averager.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    divisor = float(averager.divisor(torch.tensor(1.0 + world.rank))())
    trace = torch.stack(train(averager, wrapped, optimizer, world.rank, range(STEPS)))
    return trace.numpy(), divisor


@pytest.mark.parametrize("way", ["plain", "int8, overlap"])
def test_a_node_is_a_replica(way: str) -> None:
    ranks = spawn(train_in_nodes, 4, WAYS[way])
    traces = [trace for trace, _ in ranks]
    assert np.array_equal(traces[0], traces[1])
    assert np.array_equal(traces[2], traces[3])
    assert not np.array_equal(traces[0][0], traces[2][0])
    end = EVERY - 1
    assert np.array_equal(traces[0][end], traces[2][end]) == (way == "plain")
    assert [divisor for _, divisor in ranks] == [1.5, 1.5, 3.5, 3.5]


# --- going on ---


def go_on_from_the_mean(world: World, state_of: str) -> bool:
    torch.set_num_threads(1)
    config = config_of(**WAYS["DiLoCo, overlap"])
    averager, model = Periodic(config, world), fresh()
    wrapped, optimizer = averager.wrap(model), torch.optim.SGD(model.parameters(), 0.1)
    train(averager, wrapped, optimizer, world.rank, range(STEPS))
    with averager.consensus():
        mean = flat(model)
        state = {"own": averager.state_dict()["own"]} if state_of == "gossip" else {}
    traces = []
    for way in ("loaded", "new"):
        if way == "new":
            averager = Periodic(config, world)
            wrapped = averager.wrap(model)
        vector_to_parameters(mean.clone(), model.parameters())  # as a checkpoint's weights are
        averager.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trace = train(averager, wrapped, optimizer, world.rank, range(STEPS, STEPS + 3 * EVERY))
        traces.append(torch.stack(trace))
    return torch.equal(*traces) and bool((traces[0][0] - mean).abs().max() < 0.1)


@pytest.mark.parametrize("state_of", ["nobody", "gossip"])
def test_from_the_mean_all_goes_on_as_from_the_beginning(state_of: str) -> None:
    """Neither anchor nor momentum is left of what was before, nor what was under way."""
    assert spawn(go_on_from_the_mean, 2, state_of) == [True, True]


# --- not waiting, and not hiding ---


def run_ahead(world: World) -> None:
    """The first rank ends a period, and nearly another one, before the second ends one."""
    torch.set_num_threads(1)
    averager, model = Periodic(config_of(overlap=True), world), fresh()
    parts = averager, averager.wrap(model), torch.optim.SGD(model.parameters(), 0.1), world.rank
    if world.rank == 0:
        train(*parts, range(2 * EVERY - 1))
        dist.send(torch.zeros(1), 1)
        train(*parts, range(2 * EVERY - 1, 2 * EVERY))
    else:
        train(*parts, range(EVERY - 1))
        dist.recv(torch.zeros(1), 0)
        train(*parts, range(EVERY - 1, 2 * EVERY))
    with averager.consensus():
        pass


def test_with_overlap_nobody_waits_within_a_period() -> None:
    spawn(run_ahead, 2, timeout_s=30)


def spoil(world: World) -> dict[str, bool]:
    torch.set_num_threads(1)
    found = {}
    for way in ("plain", "bf16", "int8", "overlap"):
        averager, model = Periodic(config_of(**WAYS[way]), world), fresh()
        averager.wrap(model)
        if world.rank == 1:
            next(model.parameters()).data[3, 2] = torch.inf
        for step in range(2 * EVERY):
            list(averager.ready_parameters(step, False))
        found[way] = bool(flat(model).isfinite().all())
    return found


def test_weights_that_are_not_finite_are_so_for_all() -> None:
    """Then all skip their updates, and the run goes back."""
    assert spawn(spoil, 2) == [dict.fromkeys(("plain", "bf16", "int8", "overlap"), False)] * 2


# --- on a GPU, which is not there ---


class Stream:
    """Notes who waits for whom."""

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self._waits = name, waits

    def wait_stream(self, other: "Stream") -> None:
        self._waits.append((self.name, other.name))


class Gpu:
    """As much of a GPU as can be seen without one: streams, and who sends on which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[str, str]] = []
        self.sent: list[tuple[str, str]] = []  # thread and stream
        self._current = Stream("main", self.waits)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", self.waits))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(dist, "all_reduce", self._note)
        monkeypatch.setattr(dist, "broadcast", lambda tensor, source: None)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def _note(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self.sent.append((threading.current_thread().name, self._current.name))


def test_on_a_gpu_the_thread_that_trains_sends_beside_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages of all groups are then begun in one order, which NCCL asks for."""
    gpu = Gpu(monkeypatch)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        averager = Periodic(config_of(overlap=True), World(size=2))
        with FakeTensorMode():
            model = nn.Linear(4, 4, device="cuda:1")
            averager.wrap(model)
            for step in range(2 * EVERY):
                list(averager.ready_parameters(step, False))
                assert len(gpu.sent) == (step + 1) // EVERY
    finally:
        dist.destroy_process_group()
    assert gpu.sent == [(threading.main_thread().name, "side")] * 2
    # A message waits for what is sent; only what uses it waits for the message.
    assert gpu.waits == [("side", "main"), ("main", "side"), ("side", "main")]
