"""What bounds a run is measured beside it, and nothing of the run changes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.command_line import newest
from tests.runs import assert_equal, contents, curve, events, of_digits, train
from tests.spawn import spawn
from tests.steps import Case, flat, global_batch, make_step, share_of
from trainyard.config import RunConfig, load_recipe
from trainyard.training.micro import MicroBatchSize
from trainyard.training.step import MicroBatch, TrainStep
from trainyard.world import World

STEPS = 8
CASE = Case(batch=24, micro=5)


class Counted(nn.Module):
    """With all that a forward pass can leave behind: statistics, and random numbers drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=4),
            nn.BatchNorm2d(8),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(512, 10),
        )
        self.passes = 0
        self.fails = False

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self.passes += 1
        if self.fails:
            raise torch.OutOfMemoryError("a GPU's memory is full")
        logits: Tensor = self.body(images_BCHW)
        return logits


def stepper(world: World) -> tuple[Counted, TrainStep]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Counted()
    # As a run has it: the first step of a phase is tried on all ranks.
    micro = MicroBatchSize(CASE.micro, world=world, phase=lambda step: step // 4, report=print)
    return model, make_step(model, None, world, case=CASE, micro=micro)


def share(world: World, step: int) -> MicroBatch:
    return share_of(global_batch(replace(CASE, batch=24 * world.size), step), world)


def trained(world: World, tries: bool) -> tuple[list[float], list[float], list[float]]:
    """Losses, weights and statistics; the first rank tries each step after it, or none."""
    model, step = stepper(world)
    losses = []
    for number in range(STEPS):
        batch = share(world, number)
        losses.append(float(step(batch, number, None).loss_sum))
        if tries and world.is_first:
            before, passes = torch.get_rng_state(), model.passes
            seconds = step.trial(batch, number)
            assert seconds is not None
            assert seconds > 0
            assert model.passes - passes >= 3 * 5  # three times, in five micro-batches
            assert torch.equal(torch.get_rng_state(), before)
            assert all(p.grad is None for p in model.parameters())
    buffers = torch.cat([buffer.reshape(-1).double() for buffer in model.buffers()])
    return losses, flat(model).tolist(), buffers.tolist()


def test_a_trial_leaves_nothing_behind() -> None:
    plain = trained(World(), False)
    assert trained(World(), True) == plain
    assert plain[0][0] != plain[0][-1]


def test_the_first_rank_tries_without_the_others() -> None:
    assert spawn(trained, 2, True) == spawn(trained, 2, False)


def test_a_trial_that_does_not_fit_is_given_up() -> None:
    model, step = stepper(World())
    batch = share(World(), 0)
    step(batch, 0, None)
    weights, buffers = flat(model), [buffer.clone() for buffer in model.buffers()]
    model.fails = True
    assert step.trial(batch, 0) is None
    assert step.micro.size == CASE.micro  # as it was: what did fit goes on to fit
    assert torch.equal(flat(model), weights)
    assert all(map(torch.equal, model.buffers(), buffers))


# --- whole runs ---

RUNS = {
    "batch norm, an average of the weights": {"model.ema_decay": "0.8"},
    "accumulation": {"batch.micro": "6"},
    "stages": {"schedule.image_size": '["6 steps: 24"]'},
}
RANKS = {
    "all-reduce": {"model.ema_decay": "0.8", "batch.micro": "6"},
    "gossip": {"average.name": "gossip", "average.topology": "ring"},
    "periodic": {"average.name": "periodic", "average.every": "3"},
}
EVENT = {"bound", "head_room", "real", "device", "data", "data_wait", "ranks"}


def recipe(digits: Path, minutes: str, **options: str) -> RunConfig:
    common = {
        "data.threads": "1",
        "model.name": "test_resnet",
        "run.length": "12 steps",
        "run.log_every": "1 step",
        "run.eval_every": "6 steps",
        "run.save_every": "6 steps",
        "watch.bounds_minutes": minutes,
    }
    return load_recipe("debug", of_digits(digits) | common | options)


def assert_same(watched: Path, plain: Path) -> None:
    """All that is saved, and all that is said."""
    ours, theirs = contents(newest(watched)), contents(newest(plain))
    assert_equal(ours, theirs)
    for kind, keys in (("train", ("loss", "top1", "grad_norm")), ("val", ("top1", "loss"))):
        assert curve(watched, kind, *keys) == curve(plain, kind, *keys)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_with_and_without(name: str, digits: Path, tmp_path: Path) -> None:
    watched, plain = tmp_path / "watched", tmp_path / "plain"
    for folder, minutes in ((watched, "1e-9"), (plain, "0")):
        train(World(), recipe(digits, minutes, **RUNS[name]), folder)
    assert_same(watched, plain)
    assert events(plain, "bounds") == []
    found = events(watched, "bounds")
    # At each step but the first, of the process or of a stage: those take longer than others.
    assert [event["step"] for event in found] == {
        "stages": [4, 5, 10, 11],
    }.get(name, list(range(4, 12)))
    for event in found:
        assert event.keys() >= EVENT
        assert event["ranks"] == 1
        assert min(event["real"], event["device"], event["data"]) > 0
        assert 0 <= event["data_wait"] <= 1


@pytest.mark.parametrize("name", RANKS)
def test_ranks_come_to_the_same_with_and_without(name: str, digits: Path, tmp_path: Path) -> None:
    watched, plain = tmp_path / "watched", tmp_path / "plain"
    for folder, minutes in ((watched, "1e-9"), (plain, "0")):
        spawn(train, 2, recipe(digits, minutes, **RANKS[name]), folder)
    assert_same(watched, plain)
    replicas = list((newest(watched) / "replicas").glob("*.pt"))
    assert len(replicas) == (0 if name == "all-reduce" else 2)
    assert len(events(watched, "bounds")) == 8
    assert events(plain, "bounds") == []
    assert all(event["device"] > 0 and event["ranks"] == 2 for event in events(watched, "bounds"))


def test_where_ranks_wait_for_each_other_in_the_model_no_step_is_tried(
    digits: Path, tmp_path: Path
) -> None:
    config = recipe(digits, "1e-9", **{"average.name": "sharded", "model.name": "test_vit"})
    spawn(train, 2, config, tmp_path / "run")
    found = events(tmp_path / "run", "bounds")
    assert len(found) == 8
    assert {event["device"] for event in found} == {None}
    assert {event["bound"] for event in found} <= {"data", "device or ranks"}


def test_a_short_run_says_nothing(digits: Path, tmp_path: Path) -> None:
    """The first line comes after a minute."""
    train(World(), recipe(digits, "10"), tmp_path / "run")
    assert events(tmp_path / "run", "bounds") == []
