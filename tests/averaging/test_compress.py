"""Gradients in 16 bits."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from tests.spawn import spawn
from tests.steps import CPU, build_update
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.config import load_recipe
from trainyard.run.build import build_loss_scale
from trainyard.training.update import DynamicLossScale
from trainyard.world import World

pytestmark = pytest.mark.slow

Compress = Literal["bf16", "fp16"]


class Given(nn.Module):
    """Its gradients are those that it is given."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack(
            [(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]
        ).sum()


class Sender:
    def __init__(self, world: World, compress: Compress, *shapes: tuple[int, ...]) -> None:
        self.averager = AllReduce(AverageConfig(compress=compress), world)
        self.model = Given(*shapes)
        self.wrapped = self.averager.wrap(self.model)
        self.step = 0

    def send(self, *gradients: Tensor) -> list[Tensor]:
        torch.autograd.backward(self.wrapped(list(gradients)))
        list(self.averager.ready_parameters(self.step, False))
        self.step += 1
        arrived = [weight.grad.clone() for weight in self.model.weights if weight.grad is not None]
        self.model.zero_grad()
        return arrived


def gradient(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def send_each(world: World) -> dict[str, tuple[float, set[torch.dtype]]]:
    """How far what arrives is from the mean, and what it went as."""
    torch.set_num_threads(1)
    all_reduce, kinds = dist.all_reduce, set()

    def spied(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        kinds.add(tensor.dtype)
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = spied
    found: dict[str, tuple[float, set[torch.dtype]]] = {}
    kind: Compress
    for kind in ("bf16", "fp16"):
        kinds.clear()
        [arrived] = Sender(world, kind, (64, 64)).send(gradient(world.rank, 64, 64))
        mean = sum(gradient(rank, 64, 64) for rank in range(world.size)) / world.size
        found[kind] = float((arrived - mean).abs().max()), set(kinds)
    return found


def test_halves_arrive_rounded() -> None:
    for found in spawn(send_each, 3):
        assert 0 < found["fp16"][0] < 0.003 < found["bf16"][0] < 0.03
        assert found["fp16"][1] == {torch.float16}
        assert found["bf16"][1] == {torch.bfloat16}


def overflow(world: World) -> tuple[list[float], list[float], bool]:
    """Three updates, of which one rank has the second too large for fp16: skips, scale, moves."""
    sender = Sender(world, "fp16", (2, 2))
    scale = DynamicLossScale(CPU, initial=4.0)
    optimizer = torch.optim.SGD(sender.model.parameters(), lr=1.0)
    update = build_update(sender.model, optimizer, scale)
    skipped, scales = [], []
    for step in range(3):
        is_large = step == 1 and world.rank == 1
        mine = torch.full((2, 2), 60000.0 if is_large else 1.0)  # as it is, fp16 can hold it
        torch.autograd.backward(sender.wrapped([mine]), scale.value)
        skipped.append(float(update(step, sender.averager.ready_parameters).skipped))
        scales.append(float(scale.value))
    weights = sender.model.weights[0]
    return skipped, scales, torch.equal(weights, torch.full_like(weights, -2.0))


def test_a_gradient_that_overflows_on_its_way_is_skipped_by_all() -> None:
    assert spawn(overflow, 3) == [([0, 1, 0], [4, 2, 2], True)] * 3


@pytest.mark.quick
def test_what_is_sent_as_fp16_is_scaled() -> None:
    plain = load_recipe("debug", {"batch.precision": "bf16"})
    sent = load_recipe("debug", {"batch.precision": "bf16", "average.compress": "fp16"})
    assert not isinstance(build_loss_scale(plain, CPU), DynamicLossScale)
    assert isinstance(build_loss_scale(sent, CPU), DynamicLossScale)
