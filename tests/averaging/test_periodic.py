"""Periodic averaging: where it goes on, and what it does not hide; its rule is in test_rules.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from tests.spawn import spawn
from tests.steps import flat
from trainyard.averaging.base import Averager
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.periodic import Periodic
from trainyard.world import World

pytestmark = pytest.mark.slow

EVERY, STEPS = 3, 16  # five periods, and a step of a sixth
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}


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


# --- going on ---


def go_on_from_the_mean(world: World, state_of: str) -> bool:
    torch.set_num_threads(1)
    config = config_of(**DILOCO)
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
