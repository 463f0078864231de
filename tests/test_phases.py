"""Runs whose global batch and image size change on the way, and what a feed gives in them."""

import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from tests.cuts import Killed, cut
from tests.errors import raises, refused
from tests.runs import NUM_STEPS, OPTIONS, curve, hooked, of_digits
from tests.spawn import spawn, train_joined
from trainyard.config import RunConfig, load_recipe
from trainyard.data.batch import Keys
from trainyard.data.device.feed import TrainingFeed
from trainyard.data.index.build import open_index
from trainyard.data.index.table import Index
from trainyard.data.order import training_plan
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.run.build import build_feeds, build_run_course, check_batches
from trainyard.run.trainer import train
from trainyard.training.step import TrainStep
from trainyard.world import World

EPOCH = 1433  # samples; the digits
CHANGING = OPTIONS | {
    "model.name": "test_resnet",
    "model.drop_path": "0.3",
    "data.image_size": "24",
    "data.eval_size": "32",
    "schedule.batch_size": "['5 steps: 96', '60%: 130']",
    "schedule.image_size": "['0.6 epochs: 32', '18 steps: 40']",
    "schedule.weight_decay_end": "0.2",
    "schedule.drop_path_start": "0.1",
}
# 60% of 24 steps is 14.4; 0.6 epochs are 859.8 samples, 5 * 64 and 5.6 * 96 of them.
BATCHES = [64] * 5 + [96] * 10 + [130] * 9
SIZES = [24] * 11 + [32] * 7 + [40] * 6
PHASES = [0, 5, 11, 15, 18]  # first steps
SAMPLES = np.cumsum([0, *BATCHES]).tolist()  # before each step, and after the last
EPOCH_STEP = 16  # in which the first epoch ends

Row = tuple[int, list[int], int]  # step, ids, side of the images in pixels


def recipe(digits: Path, **changes: str) -> RunConfig:
    return load_recipe("debug", CHANGING | of_digits(digits) | changes)


def expected_batches(first: int = 0, skipped: int = 0) -> list[list[int]]:
    """The ids of every step from `first` on, cut by hand out of the one stream of the plan."""
    start, stop = SAMPLES[first] + skipped, SAMPLES[-1] + skipped
    stream = ShuffledPlan(EPOCH, stop, seed=0).batch(0)[start:]
    return [part.tolist() for part in np.split(stream, np.cumsum(BATCHES[first:])[:-1])]


def test_the_numbers_above(digits: Path) -> None:
    course = build_run_course(recipe(digits), EPOCH)
    assert [phase.start for phase in course.phases] == PHASES
    assert [course.phase(step).batch for step in range(NUM_STEPS)] == BATCHES
    assert [course.phase(step).image_size for step in range(NUM_STEPS)] == SIZES
    assert SAMPLES[EPOCH_STEP] < EPOCH < SAMPLES[EPOCH_STEP + 1]


# --- one rank: that it resumes is in training/test_resume_contract.py ---


@pytest.fixture(scope="module")
def uninterrupted(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases") / "run"
    train(recipe(digits), folder, world=World(), console=Console(quiet=True))
    return folder


@pytest.mark.slow
def test_reports_count_samples_and_epochs(uninterrupted: Path) -> None:
    rows = curve(uninterrupted, "train", "samples", "epoch")
    assert rows == {
        step: [SAMPLES[step], SAMPLES[step] / EPOCH] for step in range(1, NUM_STEPS + 1)
    }


@pytest.mark.slow
def test_reports_have_the_rates(uninterrupted: Path) -> None:
    rows = curve(uninterrupted, "train", "drop_path", "weight_decay")
    # Of the step before: the report of step 17 is about the 17th batch, which begins in epoch 0.
    drops = [0.1 if step <= EPOCH_STEP + 1 else 0.3 for step in rows]
    assert [drop for drop, _ in rows.values()] == pytest.approx(drops)
    decays = [decay for _, decay in rows.values()]
    assert decays[0] == pytest.approx(0.05)
    assert np.all(np.diff(decays) > 0)
    assert decays[-1] == pytest.approx(0.2, abs=1e-3)


# --- several ranks: the ids that the plan gives ---


def watch(world: World, config: RunConfig, folder: Path, die_after: int | None) -> list[Row]:
    """The ids and sizes of this rank's batches, step by step."""
    torch.set_num_threads(1)
    seen: list[Row] = []

    def note(_: TrainStep, batch: Any, step: int) -> None:
        seen.append((step, batch.ids.tolist(), batch.images_BCHW.shape[-1]))

    ending = nullcontext() if die_after is None else cut("killed in a step", die_after)
    with hooked(before=note), ending, suppress(Killed):
        train_joined(config, folder, world)
    return seen


def merged(ranks: list[list[Row]]) -> dict[int, tuple[list[int], int]]:
    """The ids and the image size of each global batch, from every rank's share of it."""
    found = {}
    for shares in zip(*ranks, strict=True):
        ((step, size),) = {(step, size) for step, _, size in shares}
        ids = np.full(sum(len(ids) for _, ids, _ in shares), -1)
        for rank, (_, share, _) in enumerate(shares):
            ids[rank :: len(shares)] = share
        found[step] = (ids.tolist(), size)
    return found


@pytest.mark.slow
def test_ranks_see_the_plan_in_every_phase(digits: Path, tmp_path: Path) -> None:
    """Two, killed in the fourth phase, and gone on with by three."""
    expected = dict(enumerate(zip(expected_batches(), SIZES, strict=True)))
    before = merged(spawn(watch, 2, recipe(digits), tmp_path / "run", 17))
    assert before == {step: expected[step] for step in range(17)}
    after = merged(spawn(watch, 3, recipe(digits), tmp_path / "run", None))
    assert min(after) in (15, 16)  # saved at 15, and at 16 if that evaluation was the best
    assert after == {step: expected[step] for step in range(min(after), NUM_STEPS)}
    epoch = [sample for ids, _ in (before | after).values() for sample in ids][:EPOCH]
    assert sorted(epoch) == list(range(EPOCH))  # every sample once, across two changes of batch


# --- a feed by itself ---


@pytest.fixture
def index(digits: Path) -> Index:
    return open_index(str(digits / "train"))


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[Keys]:
    """Those of each batch, as a transform is given them."""
    seen: list[Keys] = []

    def note(pixels_BCHW: Tensor, keys: Keys) -> Tensor:
        seen.append(keys)
        return pixels_BCHW

    monkeypatch.setattr("trainyard.data.feeds.pixel_transforms", lambda *_, **__: [note])
    return seen


def open_feed(config: RunConfig, index: Index, world: World | None = None) -> TrainingFeed:
    plan = training_plan(config.data, index, global_batch=config.batch.size, seed=0)
    feeds = build_feeds(config, world or World(0, 1, 0, 1), torch.device("cpu"))
    return feeds.train(index, plan, build_run_course(config, plan.epoch_samples))


def loaders() -> list[str]:
    """Processes that this one has started and that are still there."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.mark.parametrize(
    ("step", "skipped"), [(0, 7), (4, 100), (14, 1000), (18, 0), (20, 5000), (23, 1)]
)
def test_seek(step: int, skipped: int, digits: Path, index: Index, keys: list[Keys]) -> None:
    """From any step, past any number of samples: the stream as it is from there on."""
    with open_feed(recipe(digits), index) as feed:
        feed.seek(step, skipped)
        found = [(batch.ids.tolist(), batch.images_BCHW.shape) for batch in feed]
    expected = expected_batches(step, skipped)
    assert [ids for ids, _ in found] == expected
    shapes = zip(BATCHES[step:], SIZES[step:], strict=True)
    assert [shape for _, shape in found] == [(batch, 3, size, size) for batch, size in shapes]
    assert [key.position for key in keys] == [samples + skipped for samples in SAMPLES[step:-1]]


def test_going_back_in_the_middle_of_a_phase(digits: Path, index: Index) -> None:
    """As a roll-back does, from step 17 to step 10, past what was seen since."""
    before = loaders()
    skipped = SAMPLES[17] - SAMPLES[10]
    with open_feed(recipe(digits), index) as feed:
        feed.seek(13, 0)
        assert [next(feed).ids.tolist() for _ in range(4)] == expected_batches(13)[:4]
        feed.seek(10, skipped)
        assert len(loaders()) == len(before)  # not until a batch is asked for
        assert [batch.ids.tolist() for batch in feed] == expected_batches(10, skipped)
        with pytest.raises(StopIteration):
            next(feed)
        feed.seek(0, 0)
        next(feed)
        assert len(loaders()) == len(before) + 1
    assert loaders() == before


def test_pixels_do_not_depend_on_where_a_feed_began(digits: Path, index: Index) -> None:
    with open_feed(recipe(digits), index) as whole, open_feed(recipe(digits), index) as later:
        whole.seek(0, 0)
        later.seek(13, 0)
        expected = [batch.images_BCHW for batch in whole][13:]
        for images_BCHW, expected_BCHW in zip(
            (batch.images_BCHW for batch in later), expected, strict=True
        ):
            assert torch.equal(images_BCHW, expected_BCHW)


def test_repeated_augmentation(digits: Path, index: Index, keys: list[Keys]) -> None:
    """Every sample thrice running, cropped differently; an epoch is as long as it was."""
    one_size = {"run.length": "1 epoch", "schedule.image_size": "[]"}
    num_steps = build_run_course(recipe(digits, **one_size), EPOCH).num_steps
    with open_feed(recipe(digits, **one_size, **{"data.repeats": "3"}), index) as feed:
        feed.seek(0, 0)
        batches = list(feed)
    assert len(batches) == num_steps
    ids = torch.cat([batch.ids for batch in batches]).numpy()
    once = ShuffledPlan(EPOCH, len(ids), seed=0).batch(0)
    assert ids.tolist() == np.repeat(once, 3)[: len(ids)].tolist()
    assert np.concatenate([key.visits for key in keys])[:EPOCH].tolist() == [0, 1, 2] * 477 + [0, 1]
    images_BCHW = torch.cat([batch.images_BCHW for batch in batches])[:1431]
    thrice = images_BCHW.reshape(477, 3, *images_BCHW.shape[1:])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        alike = (thrice[:, one] == thrice[:, other]).flatten(1).all(dim=1)
        assert alike.float().mean() < 0.2  # of images this small there are not many crops


# --- what is refused, before there is a run directory ---


def test_a_later_batch_that_is_smaller_than_the_number_of_replicas(digits: Path) -> None:
    config = recipe(
        digits, **{"schedule.batch_size": "['5 steps: 2']", "schedule.image_size": "[]"}
    )
    course = build_run_course(config, EPOCH)
    check_batches(config, course, World(0, 2, 0, 2))
    with raises("recipe.batch-below-replicas", key="schedule.batch_size", num_replicas=3):
        check_batches(config, course, World(0, 3, 0, 3))


REFUSED = {
    "schedule.min_lr": "1.0",
    "schedule.batch_size": "['2 epochs: 32', '1 epoch: 64']",
    "schedule.drop_path_start": "0.1",
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_schedule_that_cannot_be_leaves_no_directory(
    key: str, digits: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    error = refused("train", "debug", "--data", digits, "--run", folder, f"--{key}", REFUSED[key])
    assert key in str(error)
    assert not folder.exists()
