"""Gradients that are not finite: all ranks skip them together, and after many the run goes back."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from tests.command_line import newest
from tests.cuts import cut
from tests.data.batches import batch_of_images
from tests.errors import raises
from tests.runs import (
    Lines,
    Seen,
    events,
    hooked,
    interleaved,
    of_digits,
    on_each_step,
    progress,
    read,
)
from tests.spawn import spawn, train_joined
from tests.steps import CPU, Case, build_update, make_step
from trainyard.config import RunConfig, load_recipe
from trainyard.data.batch import Batch
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.errors import Stopped
from trainyard.monitor.outcome import Outcome
from trainyard.optim.optimizers import with_momenta
from trainyard.run.trainer import train
from trainyard.training.checkpoint import find_problem
from trainyard.training.config import LossConfig
from trainyard.training.guard import Guard
from trainyard.training.losses import build_loss
from trainyard.training.step import TrainStep
from trainyard.training.update import clip_by_norm
from trainyard.world import World

pytestmark = pytest.mark.slow

NAN = float("nan")


# --- counting ---


def counted(guard: Guard, skipped: str, start: int = 0) -> list[int]:
    """The steps at which it trips, given 1 for each step whose update was skipped, else 0."""
    tripped = []
    for step, flag in enumerate(skipped, start=start + 1):
        guard.add(torch.tensor(float(flag)))
        if guard.tripped(step):
            tripped.append(step)
    return tripped


@pytest.mark.quick
def test_the_guard_trips_after_a_run_of_skipped_updates() -> None:
    assert counted(Guard(CPU, 20), "1" * 20) == [20]
    assert counted(Guard(CPU, 20), "0" * 5 + "1" * 30) == [30]  # at the next look
    assert counted(Guard(CPU, 20), ("1" * 19 + "0") * 5) == []
    assert counted(Guard(CPU, 1), "0" * 9 + "1") == [10]
    assert counted(Guard(CPU, 5), "0" * 3 + "1" * 6 + "0" * 11) == []  # over before the look


@pytest.mark.quick
@pytest.mark.parametrize("lag", [1, 8])
@pytest.mark.parametrize("limit", [1, 7, 12, 20])
def test_replicas_trip_together_and_wait_for_each_other_near_the_limit_alone(
    lag: int, limit: int
) -> None:
    """Beside the plain rule: the highest count at every tenth step."""
    rng = np.random.default_rng(limit)
    stretches = rng.integers(0, 2, (2, 40)).repeat(rng.integers(1, 30, 40), axis=1)
    running = torch.zeros(2)
    waits = 0

    def highest(_: Tensor) -> Tensor:
        nonlocal waits
        waits += 1
        return running.max()

    guards = [Guard(CPU, limit, highest, lag) for _ in range(2)]
    under_way = deque([-1] * lag)
    for step, flags in enumerate(stretches.T.tolist(), start=1):
        running = (running + 1) * torch.tensor(flags)
        for guard, flag in zip(guards, flags, strict=True):
            guard.add(torch.tensor(float(flag)))
        under_way.append(max(guard.told(step) for guard in guards))
        heard = under_way.popleft()
        for guard in guards:
            guard.hear(heard)
        tripped = [guard.tripped(step) for guard in guards]
        assert tripped == [step % 10 == 0 and int(running.max()) >= limit] * 2
    running, waits, guard = torch.zeros(2), 0, Guard(CPU, limit, highest, lag)
    for step in range(1, 41):
        guard.add(torch.tensor(0.0))
        guard.hear(guard.told(step))
        assert not guard.tripped(step)
    assert waits == (0 if lag + 1 < limit else 4)


@pytest.mark.quick
def test_the_guard_goes_on_from_its_state() -> None:
    one, other = Guard(CPU, 15), Guard(CPU, 15)
    assert counted(one, "0" * 4 + "1" * 8) == []
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert counted(other, "1" * 8, start=12) == [20]
    other.load_state_dict({"running": 0})
    assert counted(other, "1" * 8, start=12) == []


# --- a step: NaN in one rank's loss, gradient and data ---


def share(step: int, rank: int, is_bad: bool) -> Batch:
    """A rank's four samples; with one pixel that is no number."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    labels = torch.randint(5, (4,), generator=generator)
    images = torch.randn(4, 3, 32, 32, generator=generator)
    if is_bad:
        images[2, 1, 5, 7] = NAN
    return batch_of_images(images, labels)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd, fused": lambda p: with_momenta(torch.optim.SGD(p, 0.05, momentum=0.9, fused=True)),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
}
BAD_STEPS = (0, 2, 3)


class Faults:
    """What goes wrong on one rank in a step: nothing, or one of loss, gradient, data."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.kind = kind
        self.is_on = False
        plain = build_loss(LossConfig(), 0.0, teacher=None, mixes=False)

        def loss(logits: Tensor, batch: Batch) -> Tensor:
            losses = plain(logits, batch)
            is_bad = self.is_on and kind == "loss"
            return losses * torch.tensor([1.0, np.inf]) if is_bad else losses

        self.loss = loss
        parameter = list(model.parameters())[3]
        parameter.register_hook(  # type: ignore[no-untyped-call]
            lambda g: g * NAN if self.is_on and kind == "gradient" else g
        )


class Ended(NamedTuple):
    skipped: list[int]
    weights: list[NDArray[Any]]  # and the floating-point buffers of batch norm, in consensus
    moments: list[NDArray[Any]]


def train_with_faults(world: World, kind: str, optimizer_name: str, leave_out: bool) -> Ended:
    """Six steps of two micro-batches; the last rank fails in BAD_STEPS, or they are left out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=5)
    faults = Faults(model, kind)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    update = build_update(model, optimizer, clip=clip_by_norm(1.0))
    step = make_step(model, None, world, case=Case(micro=2), loss=faults.loss, update=update)
    skipped = []
    for number in range(6):
        is_bad = number in BAD_STEPS and not leave_out
        faults.is_on = is_bad and world.rank == world.size - 1
        if number in BAD_STEPS and leave_out:
            continue
        batch = share(number, world.rank, faults.is_on and kind == "data")
        if step(batch, number, None).skipped:
            skipped.append(number)
    with step.passes.averager.consensus():
        tensors = model.state_dict().values()
        weights = [t.numpy() for t in tensors if t.is_floating_point()]
    states = optimizer.state_dict()["state"].values()
    moments = [value.numpy() for state in states for value in state.values()]
    return Ended(skipped, weights, moments)


def train_in_all_ways(world: World, optimizer_name: str) -> dict[str, Ended]:
    kinds = {kind: train_with_faults(world, kind, optimizer_name, False) for kind in KINDS}
    return kinds | {"left out": train_with_faults(world, "none", optimizer_name, True)}


KINDS = ("loss", "gradient", "data")


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_all_ranks_skip_what_is_not_finite_on_one(optimizer_name: str) -> None:
    """As a run does in which the step is left out by hand: weights, moments, statistics."""
    ranks = spawn(train_in_all_ways, 2, optimizer_name)
    by_hand = ranks[0]["left out"]
    assert by_hand.skipped == []
    assert np.isfinite(np.concatenate([np.ravel(w) for w in by_hand.weights])).all()
    for rank in ranks:
        for kind in KINDS:
            assert rank[kind].skipped == list(BAD_STEPS)
            for one, other in zip(rank[kind].moments, by_hand.moments, strict=True):
                assert np.array_equal(one, other), kind
            for one, other in zip(rank[kind].weights, by_hand.weights, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


# --- a run: a stretch of samples that are not finite ---

NUM_STEPS = 40  # of 16 samples: with the ones that are passed over, less than an epoch of 1,433
BATCH = 16
OPTIONS = {
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "5 steps",
    "run.eval_every": "15 steps",
    "run.log_every": "1 step",
    "run.max_skipped": "8",
    "batch.size": str(BATCH),
    "data.threads": "1",
    "data.image_size": "16",
    "model.name": "test_resnet",  # with batch norm, which what is not finite would spoil
}
PLAN = ShuffledPlan(1433, BATCH, seed=0)
NUMBERS = {tuple(PLAN.batch(number).tolist()): number for number in range(89)}


class Run(NamedTuple):
    """A run directory whose run meets bad batches; the batches that it takes are noted."""

    folder: Path
    config: RunConfig
    bad: Sequence[int]
    seen: list[tuple[int, int]]
    """Each step with the number of the plan's batch that it took."""

    def go(self, stop_after: int | None = None) -> Outcome:
        """Start it, or start it again; a signal stops it after so many updates."""
        stopping = nullcontext() if stop_after is None else cut("stopped", stop_after)
        with hooked(before=self._note), stopping:
            return train(self.config, self.folder, world=World(), console=Console(quiet=True))

    def _note(self, _: TrainStep, batch: Any, step: int) -> None:
        number = NUMBERS[tuple(batch.ids.tolist())]
        self.seen.append((step, number))
        if number in self.bad:
            batch.images_BCHW[3] = NAN

    @property
    def lines(self) -> Lines:
        return read(self.folder)

    def events(self, name: str) -> Lines:
        return events(self.folder, name)

    def progress(self, name: str = "latest") -> dict[str, Any]:
        path = (self.folder / "checkpoints" / name).resolve()
        assert find_problem(path) is None
        return progress(path)

    def checkpoints(self) -> list[int]:
        return sorted(int(p.name[5:]) for p in (self.folder / "checkpoints").glob("step-*"))


def prepare(digits: Path, folder: Path, bad: Sequence[int], **changes: str) -> Run:
    options = OPTIONS | {key.replace("__", "."): value for key, value in changes.items()}
    return Run(folder / "run", load_recipe("debug", options | of_digits(digits)), bad, [])


STRETCH = range(22, 32)
EXPECTED = [(step, step) for step in range(30)] + [(step, step + 10) for step in range(20, 40)]


@pytest.fixture(scope="module")
def rolled_back(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Batches 22 to 31 are bad: a look at step 30 finds 8 skipped, and leads back to step 20."""
    made = prepare(digits, tmp_path_factory.mktemp("rolled-back"), STRETCH)
    assert made.go().stopped is None
    return made


def test_the_run_goes_back_and_the_data_on(rolled_back: Run) -> None:
    """No batch comes twice, and none is left out but by the plan's next epoch."""
    assert rolled_back.seen == EXPECTED
    [event] = rolled_back.events("rolled back")
    assert event["step"] == 20
    progress = rolled_back.progress()
    assert (progress["step"], progress["roll_backs"]) == (NUM_STEPS, 1)
    assert progress["skipped"] == 10 * BATCH
    assert progress["guard"] == {"running": 0}


def test_skipped_updates_are_counted_and_not_averaged(rolled_back: Run) -> None:
    trains = [line for line in rolled_back.lines if line["kind"] == "train"]
    assert [line["step"] for line in trains] == [*range(1, 31), *range(21, 41)]
    skipped = [number for number, line in enumerate(trains) if line["skipped"]]
    assert skipped == [*range(22, 30), 30, 31]  # the last two are what was left of the stretch
    times = [line["time"] for line in rolled_back.lines]
    assert times == sorted(times)  # the clock does not go back
    for line in rolled_back.lines:
        json.dumps(line, allow_nan=False)
    losses = [line["loss"] for line in trains if not line["skipped"]]
    assert min(losses) > 0
    assert max(losses) < 10
    assert rolled_back.progress()["last"]["loss"] < 10  # so the statistics are finite too


def test_links_point_to_what_they_mean_after_going_back(rolled_back: Run) -> None:
    best = rolled_back.progress()["best"]
    assert rolled_back.progress("best")["step"] == best["step"]
    assert rolled_back.progress("best")["last"] == best
    assert rolled_back.progress("latest")["step"] == NUM_STEPS


def test_checkpoints_of_the_stretch_push_none_out_that_is_needed(
    digits: Path, tmp_path: Path
) -> None:
    """Neither the one to go back to nor what was the best then; and after going back they go."""
    changes = {"run__keep": "1", "run__save_every": "1 step", "run__eval_every": "9 steps"}
    made = prepare(digits, tmp_path, STRETCH, **changes)
    assert made.go(stop_after=29).stopped is Stopped
    best_then = made.progress("step-00000022")["best"]["step"]
    assert best_then in (9, 18)
    assert {best_then, 22, 29} <= set(made.checkpoints())
    assert made.go(stop_after=2).stopped is Stopped  # one more, and one after it
    assert [event["step"] for event in made.events("rolled back")] == [22]
    assert set(made.checkpoints()) == {best_then, 22, 23}
    assert made.progress("latest")["step"] == 23
    assert made.progress("best")["step"] == best_then
    assert made.go().stopped is None
    assert made.progress()["step"] == NUM_STEPS


def test_a_checkpoint_that_did_not_help_is_left_for_the_one_before(
    digits: Path, tmp_path: Path
) -> None:
    """Twenty bad updates in a row from the checkpoint of step 20: its weights may be to blame."""
    made = prepare(digits, tmp_path, range(22, 45))
    assert made.go().stopped is None
    assert [event["step"] for event in made.events("rolled back")] == [20, 15]
    expected = [(step, step) for step in range(30)]
    expected += [(step, step + 10) for step in range(20, 30)]
    expected += [(step, step + 25) for step in range(15, NUM_STEPS)]
    assert made.seen == expected
    assert made.progress()["roll_backs"] == 2


@pytest.mark.parametrize(
    ("start", "changes", "backs", "code"),
    [
        (12, {"run__max_roll_backs": "2"}, [10, 5], "run.diverged-again"),
        (
            *(0, {"run__save_every": "0 steps", "run__eval_every": "0 steps"}),
            *([], "run.diverged-at-start"),
        ),
    ],
    ids=["too often", "without a checkpoint"],
)
def test_it_ends_with_advice(
    start: int, changes: dict[str, str], backs: list[int], code: str, digits: Path, tmp_path: Path
) -> None:
    made = prepare(digits, tmp_path, range(start, 89), **changes)
    for _ in range(2):  # started again it ends alike
        with raises(code) as error:
            made.go()
        assert error.value.exit_code == 3
        assert [event["step"] for event in made.events("rolled back")] == backs
    if not backs:
        assert len(made.seen) == 20  # no later than the first look


def test_a_short_stretch_is_skipped_and_nothing_else(digits: Path, tmp_path: Path) -> None:
    made = prepare(digits, tmp_path, range(12, 19), run__length="25 steps")
    assert made.go().stopped is None
    assert made.seen == [(step, step) for step in range(25)]
    skipped = [line["step"] for line in made.lines if line.get("skipped")]
    assert skipped == list(range(13, 20))
    assert made.progress()["roll_backs"] == 0


# --- on two ranks ---


def train_on_poisoned(world: World, config: RunConfig, folder: Path) -> Any:
    """The ids that this rank updated with, and the sum of its last weights."""
    torch.set_num_threads(1)
    bad = torch.tensor([PLAN.batch(number)[3] for number in STRETCH])  # one rank's alone
    seen: Seen = []
    weights: list[list[float]] = []

    def spoil(_: TrainStep, batch: Any, step: int) -> None:
        batch.images_BCHW[torch.isin(batch.ids, bad)] = NAN

    def note(self: TrainStep, batch: Any, step: int) -> None:
        seen.append((step, batch.ids.tolist()))
        first = next(iter(self.passes.model.parameters())).detach()
        weights.append(first.flatten()[:8].tolist())

    on_each_step(before=spoil, after=note)
    outcome = train_joined(config, folder, world)
    return seen, weights, outcome.step


def test_two_ranks_go_back_together(digits: Path, tmp_path: Path) -> None:
    config = load_recipe("debug", OPTIONS | of_digits(digits))
    (seen_0, weights_0, step), (seen_1, weights_1, _) = spawn(
        train_on_poisoned, 2, config, tmp_path / "run"
    )
    assert step == NUM_STEPS
    assert [number for number, _ in seen_0] == [number for number, _ in EXPECTED]
    assert weights_0 == weights_1
    assert np.isfinite(weights_0).all()
    for start, stop in ((0, 30), (30, 50)):  # each step once in either
        stream = interleaved([seen_0[start:stop], seen_1[start:stop]])
        for number, batch in EXPECTED[start:stop]:
            assert stream[number] == PLAN.batch(batch).tolist()
    assert [event["step"] for event in events(tmp_path / "run", "rolled back")] == [20]
    assert sum(line.get("skipped", 0) for line in read(tmp_path / "run")) == 10
    assert newest(tmp_path / "run").name == f"step-{NUM_STEPS:08d}"


def test_an_overflow_in_fp16_is_skipped_and_halves_the_scale(digits: Path, tmp_path: Path) -> None:
    changes = {"batch__precision": "fp16", "run__length": "20 steps", "model__name": "test_vit"}
    made = prepare(digits, tmp_path, (7,), **changes)
    assert made.go().stopped is None
    scale = torch.load(newest(made.folder) / "training.pt", weights_only=True)["scale"]
    skipped = sum(line["skipped"] for line in made.lines if line["kind"] == "train")
    assert skipped >= 1
    assert scale == {"value": 2.0 ** (16 - skipped), "good": 12.0}
    losses = [line["loss"] for line in made.lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]
