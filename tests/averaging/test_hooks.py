"""Gradients in fewer bits."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from tests.spawn import spawn
from tests.steps import CPU, build_update
from trainyard.averaging import hooks
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.config import load_recipe
from trainyard.errors import RecipeError
from trainyard.run.build import build_loss_scale
from trainyard.training.update import DynamicLossScale
from trainyard.world import World

Compress = Literal["bf16", "fp16", "powersgd"]

# --- what arrives ---


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
    found = {}
    for compress in ("bf16", "fp16"):
        kinds.clear()
        [arrived] = Sender(world, compress, (64, 64)).send(gradient(world.rank, 64, 64))
        mean = sum(gradient(rank, 64, 64) for rank in range(world.size)) / world.size
        found[compress] = float((arrived - mean).abs().max()), set(kinds)
    return found


def test_halves_arrive_rounded() -> None:
    for found in spawn(send_each, 3):
        assert 0 < found["fp16"][0] < 0.003 < found["bf16"][0] < 0.03
        assert found["fp16"][1] == {torch.float16}
        assert found["bf16"][1] == {torch.bfloat16}


def overflow(world: World) -> tuple[list[float], list[float], bool]:
    """Of three updates, the second too large for fp16 on one rank alone: skipped, scale, moved."""
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


def test_what_is_sent_as_fp16_is_scaled() -> None:
    plain = load_recipe("debug", {"batch.precision": "bf16"})
    sent = load_recipe("debug", {"batch.precision": "bf16", "average.compress": "fp16"})
    assert not isinstance(build_loss_scale(plain, CPU), DynamicLossScale)
    assert isinstance(build_loss_scale(sent, CPU), DynamicLossScale)


def test_powersgd_keeps_gradients_of_one_scale_only() -> None:
    with pytest.raises(RecipeError, match=r"^average\.compress = 'powersgd' .* 'fp16'"):
        load_recipe("debug", {"batch.precision": "fp16", "average.compress": "powersgd"})


# --- PowerSGD ---


def send_in_parts(world: World) -> dict[str, float]:
    torch.set_num_threads(1)
    hooks.START = 2
    found = {}
    shapes = ((40, 10, 3, 3), (40,), (6, 6))
    mine = [gradient(world.rank, *shape) for shape in shapes]
    every = [[gradient(rank, *shape) for shape in shapes] for rank in range(world.size)]
    mean = [torch.stack(of).mean(0) for of in zip(*every, strict=True)]
    sender = Sender(world, "powersgd", *shapes)
    arrived = [sender.send(*mine) for _ in range(42)]

    def distance(some: Tensor, other: Tensor) -> float:
        return float((some - other).norm() / other.norm())

    found["before it begins"] = distance(arrived[1][0], mean[0])
    found["at first"] = distance(arrived[2][0], mean[0])
    found["in the long run"] = distance(torch.stack([x[0] for x in arrived[2:]]).mean(0), mean[0])
    found["rank"] = float(torch.linalg.matrix_rank(arrived[5][0].flatten(1), rtol=1e-4))
    found["vectors and small ones"] = max(distance(arrived[9][i], mean[i]) for i in (1, 2))
    left_out = sender.averager.state_dict()["left_out"][0][0]
    again = torch.stack([x[0] for x in arrived[2:]]).sum(0).flatten(1) + left_out
    found["all is sent or left"] = distance(again, 40 * mine[0].flatten(1))
    return found


def test_powersgd_sends_little_at_a_time_and_all_in_the_end() -> None:
    """What is left out is added to the next gradient (algorithm 2): nothing is ever lost."""
    for found in spawn(send_in_parts, 3):
        assert found["before it begins"] < 1e-6
        assert 0.5 < found["at first"] < 1
        assert found["in the long run"] < found["at first"] / 2
        assert found["rank"] == hooks.RANK
        assert found["vectors and small ones"] < 1e-6
        assert found["all is sent or left"] < 1e-5


def meet_trouble(world: World) -> tuple[bool, bool, bool, float]:
    torch.set_num_threads(1)
    hooks.START = 2
    sender = Sender(world, "powersgd", (40, 50))
    mine, zeros = gradient(world.rank, 40, 50), torch.zeros(40, 50)
    infinite = mine.clone()
    infinite[3, 4] = torch.inf if world.rank == 1 else 1.0
    for _ in range(2):
        sender.send(mine)
    first = sender.send(infinite)[0]  # the first that goes so
    sender.send(mine)
    before = sender.averager.state_dict()
    second = sender.send(infinite)[0]
    after = sender.averager.state_dict()
    has_left_none = all(
        torch.equal(before[key][0][0], after[key][0][0]) for key in ("left_out", "q")
    )
    sender.averager.load_state_dict({})
    list(sender.averager.ready_parameters(1, False))
    sender.send(zeros)
    slim = torch.outer(torch.arange(40.0), torch.arange(50.0))
    arrived = sender.send(slim)[0]
    return (
        not first.isfinite().all(),
        not second.isfinite().all(),
        has_left_none,
        float((arrived - slim).abs().max() / slim.max()),
    )


def test_powersgd_forgets_what_is_not_finite_and_gets_over_a_gradient_of_zeros() -> None:
    for first_is_bad, second_is_bad, has_left_none, error in spawn(meet_trouble, 2):
        assert first_is_bad  # on every rank, though one alone had it: all skip the update
        assert second_is_bad
        assert has_left_none
        assert error < 1e-5  # what is of rank 1 arrives at once
