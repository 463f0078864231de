"""Gossip beside system C's library, decent-dp 0.2.3: the same weights after every step.

Where that library departs from its own rule, the test makes ours depart with it, or it the other
way around:

- In its first iteration it only traces in which order gradients come, and makes its update in the
  second forward pass: the first weights to compare are those after its second iteration. Until
  then its learning rate reads 0; here it is constant, and never asked for.
- It skips a round: weights are mixed in rounds 1, 3, 4, 5, ... (ours in 0, 1, 2, 3, ...; round 0 is
  that of weights which are equal yet). Ours is told these numbers.
- It makes an optimizer per bucket, by functions which give weight decay to biases and norms alone:
  here it gets one that gives it to matrices.
- It clips, and judges overflow, bucket by bucket: here nothing is clipped, and nothing overflows.
- It fails in a world of one. Here are four.
"""

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.spawn import spawn
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.gossip import Gossip
from trainyard.optim.accum_adam import AccumAdam
from trainyard.world import World

pytestmark = pytest.mark.night

STEPS = 10
TOPOLOGIES = {
    "complete": "complete",
    "ring": "ring",
    "one-peer-exponential": "one-peer-exp",
    "alternating-exponential-ring": "alternating-exp-ring",
}
ROUNDS = [0, 1, *range(3, STEPS + 2)]  # of decent-dp's iterations, counted from 0

Named = Iterable[tuple[str, Tensor]]


def groups_of(named: Named) -> list[dict[str, Any]]:
    parameters = [parameter for _, parameter in named]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def ours(named: Named, optimizer: str) -> torch.optim.Optimizer:
    if optimizer == "sgd":
        return torch.optim.SGD(groups_of(named), 0.05, momentum=0.9)
    return AccumAdam(groups_of(named), 0.01, decoupled=optimizer == "accum_adamw")


def theirs(named: Named, optimizer: str) -> torch.optim.Optimizer:
    if optimizer == "sgd":
        return ours(named, optimizer)
    optim = import_module("decent_dp.optim")
    kind = optim.AccumAdamW if optimizer == "accum_adamw" else optim.AccumAdam
    made: torch.optim.Optimizer = kind(groups_of(named), 0.01)
    return made


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    )


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    images = torch.randn(6, 3, 8, 8, generator=generator) + 0.3 * rank  # no two see alike
    return F.cross_entropy(model(images), torch.randint(5, (6,), generator=generator))


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def by_ours(world: World, topology: str, optimizer_name: str) -> list[list[Tensor]]:
    model = model_of()
    averager = Gossip(AverageConfig(name="gossip", topology=topology), world)
    wrapped = averager.wrap(model)
    optimizer = ours(model.named_parameters(), optimizer_name)
    peers_in, found = averager._peers_in, []
    averager._peers_in = lambda step: peers_in(ROUNDS[step])  # type: ignore[method-assign]
    for step in range(STEPS):
        loss_of(wrapped, step, world.rank).backward()  # type: ignore[no-untyped-call]
        for _ in averager.ready_parameters(step, False):
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights_of(model))
    with averager.consensus():  # nothing stays under way
        return found


def by_theirs(world: World, topology: str, optimizer_name: str) -> list[list[Tensor]]:
    import_module("loguru").logger.remove()
    model = model_of()
    wrapped = import_module("decent_dp.ddp").DecentralizedDataParallel(
        model,
        lambda named: theirs(named, optimizer_name),
        topology=TOPOLOGIES[topology],
        bucket_size_in_mb=1e-3,  # so that there are several
        _local_world_size=world.local_size,
    )
    found = []
    for step in range(STEPS):
        loss_of(wrapped, step, world.rank).backward()  # type: ignore[no-untyped-call]
        found.append(weights_of(model))
    assert len(wrapped._param_buckets) > 1
    wrapped.global_avg()  # nothing stays under way
    return found


def largest_differences(
    world: World, dtype: torch.dtype, optimizers: Iterable[str]
) -> dict[tuple[str, str], list[float]]:
    """Of each topology and optimizer by step, relative to the largest weight of a tensor."""
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    world = replace(world, local_size=2, local_rank=world.rank % 2, node=world.rank // 2)
    found = {}
    for pair in product(TOPOLOGIES, optimizers):
        one, other = by_ours(world, *pair), by_theirs(world, *pair)
        found[pair] = [
            max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*both, strict=True))
            for both in zip(one[1:], other[1:], strict=True)
        ]
    return found


@pytest.mark.parametrize(
    ("dtype", "optimizers", "tolerance"),
    [
        (torch.float64, ["sgd", "accum_adam", "accum_adamw"], 1e-13),
        (torch.float32, ["sgd"], 1e-6),
    ],
)
def test_the_weights_are_those_of_decent_dp_after_every_step(
    dtype: torch.dtype, optimizers: list[str], tolerance: float
) -> None:
    """Of all four replicas, to the rounding (2e-16 and 1.2e-7), which Adam's division enlarges."""
    pytest.importorskip("decent_dp", reason="the peer is not installed")
    for found in spawn(largest_differences, 4, dtype, optimizers):
        assert len(found) == len(TOPOLOGIES) * len(optimizers)
        for pair, differences in found.items():
            assert len(differences) == STEPS - 1
            assert max(differences) < tolerance, (pair, differences)
