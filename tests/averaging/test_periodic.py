"""Periodic averaging beside a calculation in one process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from tests.spawn import spawn
from tests.steps import flat
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.base import Averager
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.periodic import Periodic
from trainyard.world import World

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
EVERY, STEPS = 3, 16  # five periods, and a step of a sixth
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DiLoCo": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "momentum alone": {"outer_momentum": 0.5},
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
    trace = []
    for step in range(STEPS):
        for rank, model in enumerate(models):
            (loss_of(model, step, rank) / 8).backward()  # type: ignore[no-untyped-call]
            inner[rank].step()
            inner[rank].zero_grad()
        if step % EVERY == EVERY - 1:
            mean = torch.stack([anchor - flat(model) for model in models]).mean(dim=0)
            velocity = momentum * velocity + mean
            anchor = anchor - lr * (mean + momentum * velocity)
            for model in models:
                vector_to_parameters(anchor.clone(), model.parameters())
        trace.append(torch.stack([flat(model) for model in models]))
    return torch.stack(trace, dim=1).numpy()


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
        assert (ends == ends[0]).all()
        assert not np.array_equal(ours[0, -1], ours[1, -1])


# --- in every step ---


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


@pytest.mark.quick
def test_plain_sgd_averaged_in_every_step_is_all_reduce() -> None:
    for differences in spawn(beside_all_reduce, 2):
        assert max(differences) < 1e-14


# --- going on ---


def go_on_from_the_mean(world: World, state_of: str) -> bool:
    torch.set_num_threads(1)
    config = config_of(**WAYS["DiLoCo"])
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
    return torch.equal(*traces) and bool((traces[0][0] - mean).abs().max() < 0.2)


@pytest.mark.parametrize("state_of", ["nobody", "gossip"])
def test_from_the_mean_all_goes_on_as_from_the_beginning(state_of: str) -> None:
    """Neither anchor nor momentum is left of what was before."""
    assert spawn(go_on_from_the_mean, 2, state_of) == [True, True]


# --- not hiding ---


def spoil(world: World) -> bool:
    torch.set_num_threads(1)
    averager, model = Periodic(config_of(), world), fresh()
    averager.wrap(model)
    if world.rank == 1:
        next(model.parameters()).data[3, 2] = torch.inf
    for step in range(EVERY):
        list(averager.ready_parameters(step, False))
    return bool(flat(model).isfinite().all())


def test_weights_that_are_not_finite_are_so_for_all() -> None:
    """Then all skip their updates, and the run goes back."""
    assert spawn(spoil, 2) == [False, False]
