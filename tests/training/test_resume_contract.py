"""A run that is cut off and started again ends as one that nothing happened to, bit for bit.

The table RUNS x CUTS. A kill is an exception that no handler expects; three are real.
"""

import functools
import os
import re
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console

from tests import test_phases
from tests.command_line import newest, run
from tests.cuts import CUTS, SIGNALS, Killed, cut, die
from tests.data.streams import write_shards
from tests.errors import raises
from tests.full_disk import full_disk
from tests.runs import (
    NUM_STEPS,
    OPTIONS,
    RESNET,
    assert_equal,
    assert_same_end,
    contents,
    curve,
    ended,
    events,
    exit_code,
    hooked,
    progress,
    read,
    words,
)
from tests.tiers import tiered
from trainyard.config import RunConfig, load_recipe
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.errors import STOPS, Stopped
from trainyard.monitor.outcome import Outcome
from trainyard.run.trainer import Trainer, train
from trainyard.training import saver
from trainyard.training.step import TrainStep
from trainyard.world import World


class Run(NamedTuple):
    """Keys of a recipe; FOLDER in them is that of the data and of a teacher."""

    keys: dict[str, str]
    at: tuple[int, int, int, int] = (13, 10, 11, 16)
    """The number of updates before each of CUTS, in a save: of the first save from there on."""
    num_steps: int = NUM_STEPS
    bad: tuple[int, ...] = ()
    """Batches of the plan, of which each has a sample that is not finite."""


AUGMENTED = {
    "model.name": "test_vit",
    "augment.randaugment": "rand-m9-mstd0.5-inc1",
    "augment.erasing": "0.5",
    "augment.mixup": "0.8",
    "augment.cutmix": "1.0",
    "augment.mix_prob": "0.8",
    "augment.label_smoothing": "0.1",
}
PER_BATCH = AUGMENTED | {
    "augment.mix_mode": "batch",
    "loss.distillation": "hard",
    "loss.teacher": "FOLDER/teacher",
}
PER_SAMPLE = AUGMENTED | {
    "augment.mix_mode": "elem",
    "augment.erasing_mode": "rand",
    "loss.name": "bce",
    "loss.bce_threshold": "0.2",
}
STREAM = {
    "data.train": "pipe:cat 'FOLDER/stream/part-{000..003}.tar'",
    "data.val": "FOLDER/stream",
    "data.order": "join",
    "data.samples": "45",
    "data.image_size": "16",
    "model.name": "test_vit",
    "model.drop_path": "0.2",
    "augment.mixup": "0.2",
    "batch.size": "8",
    "run.length": "16 steps",
    "run.save_every": "6 steps",
    "run.eval_every": "9 steps",
}
SPOILT = RESNET | {"batch.size": "16", "run.eval_every": "15 steps", "run.max_skipped": "8"}
RUNS = {
    "batch norm": Run(RESNET),
    "drop path in micro-batches": Run(
        {"model.name": "test_vit", "model.drop_path": "0.3", "batch.micro": "24"}
    ),
    "locality": Run({"data.locality": "300"}),
    "resample": Run({"data.train": "FOLDER/shards/*.tar", "data.order": "resample"}),
    "weights": Run({"data.train": "['FOLDER/low','FOLDER/high']", "data.weights": "1.5,0.5"}),
    "one mixing per batch, from a teacher": Run(PER_BATCH),
    "one mixing per sample, bce": Run(PER_SAMPLE),
    # The first evaluation is the best: updates 13 to 24 are not made.
    "out of patience": Run(
        {"optim.lr": "1e-12", "run.eval_every": "4 steps", "run.patience": "2"}, (11, 6, 9, 10), 12
    ),
    "phases": Run(test_phases.CHANGING, at=(13, 10, 18, 23)),
    "a stream": Run(STREAM, at=(9, 7, 14, 7), num_steps=16),
    # A look at step 30 finds 8 updates skipped, and leads back to step 20.
    "goes back": Run(
        SPOILT | {"run.length": "40 steps"}, (31, 25, 27, 30), 40, bad=tuple(range(22, 32))
    ),
    "fp16": Run(
        {"model.name": "test_vit", "batch.size": "16", "batch.precision": "fp16"}, bad=(7,)
    ),
}


@pytest.fixture(scope="module")
def data(digits: Path, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits, in two halves as well, and as shards of 150; streams; a teacher."""
    made = tmp_path_factory.mktemp("data")
    (made / "teacher").symlink_to(finished)
    for split in ("train", "val"):
        (made / split).symlink_to(digits / split)
    for first, (half, numbers) in enumerate((("low", "0123456"), ("high", "56789"))):
        for number in numbers:
            (made / half / number).mkdir(parents=True)
            images = sorted((digits / "train" / number).iterdir())
            for image in images[first::2] if number in "56" else images:  # each in one half
                (made / half / number / image.name).symlink_to(image)
    (made / "shards").mkdir()
    images = sorted((digits / "train").glob("*/*.png"), key=lambda path: path.name)
    for start in range(0, len(images), 150):
        with tarfile.open(made / "shards" / f"digits-{start:04d}.tar", "w") as shard:
            for image in images[start : start + 150]:
                shard.add(image, f"{image.stem}.png")
                label = made / "label"
                label.write_text(image.parent.name)
                shard.add(label, f"{image.stem}.cls")
    write_shards(made / "stream", (9, 0, 5, 31))
    return made


def recipe(data_folder: Path, keys: dict[str, str]) -> RunConfig:
    where = {"data.train": "FOLDER/train", "data.val": "FOLDER/val"}
    every = OPTIONS | where | keys
    return load_recipe(
        "debug", {key: value.replace("FOLDER", str(data_folder)) for key, value in every.items()}
    )


@contextmanager
def spoilt(run: Run) -> Iterator[None]:
    """Inside, one sample of each bad batch is not finite."""
    plan = ShuffledPlan(1433, 16, seed=0)
    bad = torch.tensor([plan.batch(number)[3] for number in run.bad])

    def spoil(_: TrainStep, batch: Any, step: int) -> None:
        batch.images_BCHW[torch.isin(batch.ids, bad)] = torch.nan

    with hooked(before=spoil if run.bad else None):
        yield


# --- the table ---


def go(run: Run, folder: Path, data: Path) -> Outcome:
    """Start a run, or start it again."""
    with spoilt(run):
        return train(recipe(data, run.keys), folder, world=World(), console=Console(quiet=True))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of each name that nothing happens to."""

    @functools.cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        assert go(RUNS[name], folder, data).stopped is None
        return folder

    return made


def cells() -> list[Any]:
    """The cells, with their tiers. One cut of each run is slow; the first cell of all is quick.

    One is added: a stop at the very look that sends the run back, which it is to do when resumed.
    """
    found = []
    for row, name in enumerate(RUNS):
        for column, kind in enumerate(CUTS):
            is_slow = row % len(CUTS) == column
            is_slow = is_slow or (name, kind) == ("goes back", "asked to come back")
            mark = pytest.mark.slow if is_slow else pytest.mark.night
            marks = () if row == column == 0 else mark
            found.append(pytest.param(name, kind, marks=marks))
    return found


@pytest.mark.parametrize(("name", "kind"), cells())
def test_a_run_that_is_cut_off_and_started_again_ends_alike(
    name: str, kind: str, whole: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    case, folder = RUNS[name], tmp_path / "run"
    at = case.at[CUTS.index(kind)]
    with cut(kind, at):
        if kind in SIGNALS:
            assert go(case, folder, data).stopped is STOPS[SIGNALS[kind]]
        else:
            with pytest.raises(Killed):
                go(case, folder, data)
    if kind == "killed in a save":
        assert list(folder.glob("checkpoints/.step-*/model.safetensors"))
    if kind in SIGNALS and not case.bad:
        assert newest(folder).name == f"step-{at:08d}"
    assert go(case, folder, data).stopped is None
    assert len(events(folder, "resumed")) == 1
    assert_same_end(folder, whole(name), case.num_steps)


ODD_MOMENTS = {"the first step": 1, "a save": 10, "an evaluation": 16, "the last step": NUM_STEPS}


@pytest.mark.slow
@pytest.mark.parametrize("at", tiered(ODD_MOMENTS.values(), night=[1, 10]), ids=ODD_MOMENTS)
def test_a_stop_at_an_odd_moment(
    at: int, whole: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with cut("stopped", at):
        assert go(RUNS["batch norm"], folder, data).stopped is Stopped
    assert newest(folder).name == f"step-{at:08d}"
    assert at not in curve(folder, "val")  # not while someone waits for the end
    go(RUNS["batch norm"], folder, data)
    assert_same_end(folder, whole("batch norm"))


def command(arguments: list[str], kind: str, at: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with cut(kind, at, end=die):
        run(*arguments)


@pytest.mark.slow
def test_a_command_that_is_killed_for_real(
    whole: Callable[[str], Path], digits: Path, data: Path, tmp_path: Path
) -> None:
    """In a save, then in a step: kill -9. That of a rank is in distributed/test_losses.py."""
    folder = tmp_path / "run"
    arguments = words(digits, folder, RESNET)
    assert ended(command, arguments, "killed in a save", 10) == -signal.SIGKILL
    assert list(folder.glob("checkpoints/.step-*/model.safetensors"))
    assert ended(command, arguments, "killed in a step", 5) == -signal.SIGKILL
    assert exit_code(arguments) == 0
    assert [event["step"] for event in events(folder, "resumed")] == [8, 10]
    assert_same_end(folder, whole("batch norm"))


# --- from other checkpoints than the newest of the same run ---


@pytest.mark.slow
def test_an_evaluation_that_a_stop_cut_off_is_saved_though_not_the_best(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = Trainer._evaluation

    def score(self: Trainer) -> dict[str, Any]:
        return evaluation(self) | {"top1": 1 / self.state.step}

    monkeypatch.setattr(Trainer, "_evaluation", score)
    run_, folder = Run({"optim.lr": "1e-12", "run.length": "16 steps"}), tmp_path / "run"
    with cut("stopped", 16):
        assert go(run_, folder, data).stopped is Stopped
    for was_complete in (False, True):
        assert go(run_, folder, data).was_complete == was_complete
    found = progress(newest(folder))
    assert (found["best"]["step"], found["last"]["step"]) == (8, 16)
    assert list(curve(folder, "val")) == [8, 16]


@pytest.mark.slow
def test_what_a_kill_or_a_power_cut_leaves_is_mended(
    whole: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    """A kill between a checkpoint and the link to it; half a line of figures."""
    folder = Path(shutil.copytree(whole("batch norm"), tmp_path / "run", symlinks=True))
    best, before = folder / "checkpoints" / "best", read(folder)
    right = best.readlink()
    assert right.name != "step-00000008"
    best.unlink()
    best.symlink_to("step-00000008")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    go(RUNS["batch norm"], folder, data)
    assert best.readlink() == right
    assert read(folder)[: len(before)] == before


@pytest.mark.slow
def test_a_run_goes_on_beside_what_is_no_checkpoint(
    whole: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    """A remark names it, once; the run saves as if it were not there."""
    folder = tmp_path / "run"
    with cut("stopped", 12):
        go(RUNS["batch norm"], folder, data)
    (folder / "checkpoints" / "step-00000099").write_text("")
    (folder / "checkpoints" / "step-00000010" / "progress.json").write_text("[]")
    go(RUNS["batch norm"], folder, data)
    (remark,) = events(folder, "bad checkpoint")
    assert "step-00000099" in remark["message"]
    (folder / "checkpoints" / "step-00000099").unlink()
    assert_same_end(folder, whole("batch norm"))


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_it_goes_on_later(
    whole: Callable[[str], Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, begin = tmp_path / "run", saver.begin

    def begin_with_little_room(final: Path) -> Path:
        if final.name == "step-00000010":
            full.enter_context(full_disk(20_000))
        return begin(final)

    with ExitStack() as full, monkeypatch.context() as patch:
        patch.setattr(saver, "begin", begin_with_little_room)
        with raises("disk.full", path=folder / "checkpoints" / "step-00000010"):
            go(RUNS["batch norm"], folder, data)
    assert newest(folder).name == "step-00000008"
    go(RUNS["batch norm"], folder, data)
    assert_same_end(folder, whole("batch norm"))


@pytest.mark.slow
def test_from_a_checkpoint_of_another_run(
    whole: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    start = whole("batch norm") / "checkpoints" / "step-00000016"
    branch, folder = Run(RESNET | {"run.resume": str(start)}), tmp_path / "run"
    with cut("stopped", 5):
        assert go(branch, folder, data).stopped is Stopped
    go(branch, folder, data)  # goes on from its own checkpoint, not from the other's again
    assert list(curve(folder, "train")) == list(range(17, NUM_STEPS + 1))
    ours, theirs = newest(folder), newest(whole("batch norm"))
    assert_equal(contents(ours)["model"], contents(theirs)["model"])
    never = Run(RESNET | {"run.resume": "never"})
    with raises("run.already-begun", path=folder):
        go(never, folder, data)


@pytest.mark.slow
def test_a_longer_run_from_the_end_of_a_shorter_one(data: Path, tmp_path: Path) -> None:
    """Trained on after its end, and branched before its decay: bit for bit the whole runs."""
    averages = RESNET | {"model.ema_decay": "[0.5, 0.9]", "schedule.warmup": "3 steps"}
    rates = averages | {"schedule.name": "sqrt", "schedule.decay": "6 steps"}
    steady = tmp_path / "steady"  # of which the latest checkpoint counts, not the best
    constant = averages | {"schedule.name": "constant", "run.length": "10 steps"}
    go(Run(constant), steady, data)
    for length, last in ((16, steady), (24, newest(steady))):
        keys = rates | {"run.length": f"{length} steps"}
        whole, branch = tmp_path / f"{length}", tmp_path / f"branch-{length}"
        go(Run(keys), whole, data)
        go(Run(keys | {"run.resume": str(last)}), branch, data)
        assert curve(branch, "train")[11] == curve(whole, "train")[11]
        found, expected = contents(newest(branch)), contents(newest(whole))
        for name in ("model", "ema-0.5", "ema-0.9"):
            assert_equal(found[name], expected[name])


def test_the_conditions_of_a_run_are_saved(finished: Path) -> None:
    found = progress(newest(finished))["conditions"]
    assert found["ranks"] == "1" and found["batch.micro"] == "auto"
    assert re.fullmatch(r"\d+ threads?, \w+", found["a rank's device"])


@pytest.mark.slow
@pytest.mark.parametrize("keys", [PER_BATCH, PER_SAMPLE], ids=["per batch", "per sample"])
def test_micro_batches_of_augmented_batches_change_nothing(
    keys: dict[str, str], data: Path, tmp_path: Path
) -> None:
    """Without batch norm; and without stochastic depth, which draws for each micro-batch."""
    short = keys | {"run.length": "5 steps", "run.eval_every": "0 steps"}
    curves = []
    for micro in ("64", "6"):
        go(Run(short | {"batch.micro": micro}), tmp_path / micro, data)
        curves.append(curve(tmp_path / micro, "train", "loss", "top1"))
    whole, parts = curves
    assert list(whole) == [1, 2, 3, 4, 5]
    assert whole[1][0] != whole[5][0]
    for step, values in whole.items():
        assert parts[step] == pytest.approx(values, rel=1e-6)
