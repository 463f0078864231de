"""Gradients in fewer bits, and runs that go on exactly as if they had not been stopped."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from tests.spawn import spawn
from tests.training.test_equivalence import flat, make_step
from trainyard.averaging import allreduce, hooks
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.config import load_recipe
from trainyard.errors import RecipeError
from trainyard.monitor.clock import Clock
from trainyard.run.build import build_loss_scale
from trainyard.training.checkpoint import TrainState, load_checkpoint
from trainyard.training.guard import Guard
from trainyard.training.keeping import save_checkpoint
from trainyard.training.step import MicroBatch
from trainyard.training.update import DynamicLossScale, LossScale, Update, no_clip
from trainyard.world import World

Compress = Literal["bf16", "fp16", "powersgd"] | None
COMPRESS: tuple[Compress, ...] = (None, "bf16", "powersgd")
CPU = torch.device("cpu")

# --- stopped and gone on ---

NUM_STEPS, STOP = 6, 3


def several_buckets() -> nn.Module:
    """Two of DDP's: the first one takes a megabyte."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 400), nn.Tanh(), nn.Linear(400, 700), nn.Linear(700, 10)
    )


def batch_of(world: World, step: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(step * world.size + world.rank)
    labels = torch.randint(10, (4,), generator=generator)
    images = torch.randn(4, 3, 4, 4, generator=generator)
    return MicroBatch(images, labels, labels, torch.ones(4), torch.ones(4))


class Process:
    """What one has of a run; a checkpoint is all that another takes over."""

    def __init__(self, world: World, compress: Compress) -> None:
        self.world, self.model = world, several_buckets()
        averager = AllReduce(AverageConfig(compress=compress), world)
        self.step: Any = make_step(self.model, averager, world)
        self.state = TrainState(
            model=self.model,
            optimizer=self.step.update._optimizer,
            averager=averager,
            ema=None,
            scale=LossScale(CPU),
            guard=Guard(CPU, limit=3),
            clock=Clock(),
            classes=["cat", "dog"],
        )

    def run(self, end: int) -> Tensor:
        for number in range(self.state.step, end):
            self.step(batch_of(self.world, number), number, None)
        self.state.step = end
        return flat(self.model)

    def save(self, folder: Path) -> Path:
        with self.state.averager.consensus():
            return save_checkpoint(self.state, folder, keep=1, world=self.world)


class Ends(NamedTuple):
    equal: bool  # of a run that was stopped, and of one that was not
    num_buckets: int
    note: str | None


def stop_and_go_on(world: World, folder: Path) -> list[Ends]:
    torch.set_num_threads(1)
    hooks.START = 2
    return [_stop_and_go_on(world, folder / f"{compress}", compress) for compress in COMPRESS]


def _stop_and_go_on(world: World, folder: Path, compress: Compress) -> Ends:
    undisturbed, killed, resumed = (Process(world, compress) for _ in range(3))
    expected = undisturbed.run(NUM_STEPS)
    killed.run(STOP)
    note = load_checkpoint(resumed.state, killed.save(folder))
    ends = resumed.run(NUM_STEPS)
    buckets = undisturbed.step.model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    return Ends(torch.equal(ends, expected), len(buckets), note)


@pytest.mark.parametrize("size", [3, 4])
def test_a_run_that_goes_on_ends_as_one_that_was_not_stopped(size: int, tmp_path: Path) -> None:
    assert spawn(stop_and_go_on, size, tmp_path) == [[Ends(True, 2, None)] * 3] * size
    saved = [path.relative_to(tmp_path) for path in tmp_path.rglob("replicas/*.pt")]
    assert len(saved) == size
    assert {path.parts[0] for path in saved} == {"powersgd"}


def stop_with_ddp_s_own_buckets(world: World, folder: Path) -> bool:
    torch.set_num_threads(1)
    allreduce._fix_buckets = lambda ddp: None
    return _stop_and_go_on(world, folder, None).equal


def test_it_would_not_if_buckets_were_cut_after_the_first_step(tmp_path: Path) -> None:
    assert spawn(stop_with_ddp_s_own_buckets, 3, tmp_path) == [False] * 3


def go_on_from(world: World, path: Path) -> tuple[str | None, bool, bool]:
    """What is said of it; whether momentum came along; whether anything is left out at first."""
    torch.set_num_threads(1)
    hooks.START = 2
    process = Process(world, "powersgd")
    note = load_checkpoint(process.state, path)
    left_out = process.state.averager.state_dict().get("left_out")
    process.run(STOP + 2)
    return note, len(process.state.optimizer.state) > 0, bool(left_out)


def train_and_save(world: World, folder: Path) -> Path:
    torch.set_num_threads(1)
    hooks.START = 2
    process = Process(world, "powersgd")
    process.run(STOP)
    return process.save(folder)


def test_another_number_of_ranks_goes_on_without_what_was_left_out(tmp_path: Path) -> None:
    path = spawn(train_and_save, 3, tmp_path)[0]
    training = torch.load(path / "training.pt", weights_only=True)
    own = torch.load(path / "replicas" / "00002.pt", weights_only=True)
    assert training["optimizer"]["state"]
    assert list(own) == ["averager"]
    found = [*spawn(go_on_from, 2, path), go_on_from(World(), path)]
    for size, (note, has_momentum, has_left_out) in zip((2, 2, 1), found, strict=True):
        assert note == (
            f"3 replicas were saved and {size} go on: without what was left out of the gradients "
            "that each has sent (average.compress)"
        )
        assert has_momentum
        assert not has_left_out


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
    update = Update(sender.model, optimizer, scale, clip=no_clip, measure=lambda step: False)
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
