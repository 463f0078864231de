"""A run that was cut off and goes on ends where an uninterrupted one does, bit for bit."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.command_line import newest, run
from tests.full_disk import full_disk
from tests.runs import (
    NUM_STEPS,
    OPTIONS,
    RESNET,
    assert_same_end,
    command,
    curve,
    events,
    exit_code,
    forked,
    interleaved,
    kill_at,
    noted,
    on_each_step,
    progress,
    read,
    recipe,
    train_on,
    words,
)
from tests.spawn import spawn, train_joined
from tests.steps import save_checkpoint
from tests.tiers import tiered
from tests.training.test_checkpoint import state_at
from trainyard.config import RunConfig, load_recipe
from trainyard.data.index.merge import open_merged
from trainyard.data.order import training_plan
from trainyard.data.sampler.plan import EndlessPlan
from trainyard.errors import CheckpointError, DataError, InputError, Requeued, Stopped
from trainyard.files import RunDirectory, check_run, find_checkpoint, write_text
from trainyard.run.resume import claim_directory, is_new_run, resume
from trainyard.run.trainer import train
from trainyard.training import saver
from trainyard.training.step import TrainStep
from trainyard.world import World

MODELS = {
    "batch norm": RESNET,
    "stochastic depth": {"model.name": "test_vit", "model.drop_path": "0.3"},
}
AUGMENTED = {
    "model.name": "test_vit",
    "augment.randaugment": "rand-m9-mstd0.5-inc1",
    "augment.erasing": "0.5",
    "augment.mixup": "0.8",
    "augment.cutmix": "1.0",
    "augment.mix_prob": "0.8",
    "augment.label_smoothing": "0.1",
}
AUGMENTATIONS = {
    "one draw per batch, from a teacher": {
        "augment.mix_mode": "batch",
        "loss.distillation": "hard",
        "loss.teacher": "TEACHER",
    },
    "one per sample, bce": {
        "augment.mix_mode": "elem",
        "augment.erasing_mode": "rand",
        "loss.name": "bce",
        "loss.bce_threshold": "0.2",
    },
}
IN_ORDER = {"data.train": "train", "data.val": "val"}
ORDERS = {
    "locality": IN_ORDER | {"data.locality": "300"},
    "resample": IN_ORDER | {"data.train": "shards/digits-*.tar", "data.order": "resample"},
    "weights": IN_ORDER | {"data.train": "['low','high']", "data.weights": "1.5,0.5"},
}


@pytest.fixture(scope="module")
def uninterrupted(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each model that nothing happened to."""
    folders = {}
    for name, change in MODELS.items():
        folders[name] = tmp_path_factory.mktemp("uninterrupted") / "run"
        assert exit_code(words(digits, folders[name], change)) == 0
    return folders


# --- one rank: the same, bit for bit ---


@pytest.mark.slow
@pytest.mark.parametrize("model", tiered(MODELS, quick=["batch norm"]))
def test_killed_at_random_steps(
    model: str, uninterrupted: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    arguments = words(digits, tmp_path / "run", MODELS[model])
    metrics = tmp_path / "run" / "metrics.jsonl"
    for step in sorted(random.Random(model).sample(range(1, NUM_STEPS - 3), 3)):
        process = forked(command, arguments)
        kill_at(step, metrics, process, process.is_alive)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert step in curve(tmp_path / "run", "train", "loss")  # and every line is whole
    assert exit_code(arguments) == 0
    assert_same_end(tmp_path / "run", uninterrupted[model])


@pytest.mark.slow
def test_killed_as_a_command(uninterrupted: dict[str, Path], digits: Path, tmp_path: Path) -> None:
    """The real thing: `python -m trainyard train`, kill -9, the same command again."""
    python = [sys.executable, "-m", "trainyard"]
    arguments = python + words(digits, tmp_path / "run", RESNET)
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        kill_at(13, metrics, process, lambda: process.poll() is None)
    assert process.returncode == -signal.SIGKILL
    again = subprocess.run(arguments, stdout=subprocess.PIPE, check=True)
    assert json.loads(again.stdout)["step"] == NUM_STEPS
    assert_same_end(tmp_path / "run", uninterrupted["batch norm"])
    (resumed,) = events(tmp_path / "run", "resumed")
    assert resumed["step"] in (8, 10)  # saved at 10, or killed on the way


@pytest.fixture(scope="module")
def data(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits, in two halves as well, and as shards of 150."""
    folder = tmp_path_factory.mktemp("orders")
    for split in ("train", "val"):
        (folder / split).symlink_to(digits / split)
    for half, numbers in (("low", "0123456"), ("high", "56789")):
        (folder / half).mkdir()
        for number in numbers:
            (folder / half / number).symlink_to(digits / "train" / number)
    (folder / "shards").mkdir()
    images = sorted((digits / "train").glob("*/*.png"), key=lambda path: path.name)
    for start in range(0, len(images), 150):
        with tarfile.open(folder / "shards" / f"digits-{start:04d}.tar", "w") as shard:
            for image in images[start : start + 150]:
                shard.add(image, f"{image.stem}.png")
                label = folder / "label"
                label.write_text(image.parent.name)
                shard.add(label, f"{image.stem}.cls")
    return folder


def options_of(way: str, finished: Path) -> dict[str, str]:
    if way in ORDERS:
        return ORDERS[way]
    options = IN_ORDER | AUGMENTED | AUGMENTATIONS[way]
    return {key: str(finished) if key == "loss.teacher" else options[key] for key in options}


@pytest.mark.slow
@pytest.mark.parametrize("way", [*ORDERS, *AUGMENTATIONS])
def test_killed_with_data_in_any_order_and_augmented(
    way: str, data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    options = options_of(way, finished)
    assert exit_code(words(None, tmp_path / "whole", options)) == 0
    arguments = words(None, tmp_path / "run", options)
    assert exit_code(arguments, stop_at=13, number=signal.SIGKILL) == -signal.SIGKILL
    assert exit_code(arguments) == 0
    assert [event["step"] for event in events(tmp_path / "run", "resumed")] == [10]
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("way", AUGMENTATIONS)
def test_micro_batches_of_augmented_batches_change_nothing(
    way: str, data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without batch norm; and without stochastic depth, which draws for each micro-batch."""
    monkeypatch.chdir(data)
    common = options_of(way, finished) | {"run.length": "5 steps", "run.eval_every": "0 steps"}
    curves = []
    for micro in ("64", "6"):
        assert exit_code(words(None, tmp_path / micro, common, {"batch.micro": micro})) == 0
        curves.append(curve(tmp_path / micro, "train", "loss", "top1"))
    whole, cut = curves
    assert list(whole) == [1, 2, 3, 4, 5]
    assert whole[1][0] != whole[5][0]
    for step, values in whole.items():
        assert cut[step] == pytest.approx(values, rel=1e-6)


STOPS = {
    "in an epoch": (11, signal.SIGTERM),
    "at a save": (10, signal.SIGTERM),
    "at an evaluation": (16, signal.SIGTERM),
    "after the first step": (1, signal.SIGUSR2),
    "after the last step": (NUM_STEPS, signal.SIGTERM),
}


@pytest.mark.slow
@pytest.mark.parametrize("when", tiered(STOPS, quick=["in an epoch"]))
def test_stopped_by_a_signal(
    when: str, uninterrupted: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    step, number = STOPS[when]
    arguments = words(digits, tmp_path / "run", RESNET)
    reason = Requeued if number == signal.SIGUSR2 else Stopped
    assert exit_code(arguments, stop_at=step, number=number) == reason.exit_code
    assert newest(tmp_path / "run").name == f"step-{step:08d}"
    assert step not in curve(tmp_path / "run", "val")  # not while someone waits for the end
    assert exit_code(arguments) == 0
    assert_same_end(tmp_path / "run", uninterrupted["batch norm"])


def test_an_evaluation_that_a_stop_cut_off_is_saved_though_not_the_best(
    digits: Path, tmp_path: Path
) -> None:
    learns_nothing = {"optim.lr": "1e-12", "run.length": "16 steps", "model.name": "test_vit"}
    arguments = words(digits, tmp_path / "run", learns_nothing)
    assert exit_code(arguments, stop_at=16, number=signal.SIGTERM) == Stopped.exit_code
    for _ in range(2):  # the second time there is nothing left to do
        assert exit_code(arguments) == 0
    found = progress(newest(tmp_path / "run"))
    assert (found["best"]["step"], found["last"]["step"]) == (8, 16)
    assert list(curve(tmp_path / "run", "val")) == [8, 16]


def test_best_is_pointed_to_though_a_kill_came_before(
    uninterrupted: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    """Between a checkpoint and the link to it."""
    folder = Path(shutil.copytree(uninterrupted["batch norm"], tmp_path / "run", symlinks=True))
    best = folder / "checkpoints" / "best"
    right = best.readlink()
    assert right.name != "step-00000008"
    best.unlink()
    best.symlink_to("step-00000008")
    assert exit_code(words(digits, folder, RESNET)) == 0
    assert best.readlink() == right


# --- run.resume ---


def test_never(uninterrupted: dict[str, Path], digits: Path, tmp_path: Path) -> None:
    never = RESNET | {"run.resume": "never"}
    assert exit_code(words(digits, tmp_path / "run", never)) == 0
    assert_same_end(tmp_path / "run", uninterrupted["batch norm"])
    assert exit_code(words(digits, tmp_path / "run", never)) == 2  # it has checkpoints now


def test_from_a_checkpoint_of_another_run(
    uninterrupted: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    start = uninterrupted["batch norm"] / "checkpoints" / "step-00000016"
    begin = RESNET | {"run.resume": str(start)}
    arguments = words(digits, tmp_path / "run", begin)
    assert exit_code(arguments, stop_at=21, number=signal.SIGTERM) == Stopped.exit_code
    assert exit_code(arguments) == 0  # goes on from its own checkpoint, not from the other's again
    assert list(curve(tmp_path / "run", "train")) == list(range(17, NUM_STEPS + 1))
    ours, theirs = newest(tmp_path / "run"), newest(uninterrupted["batch norm"])
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


def test_a_longer_run_from_the_end_of_a_shorter_one(digits: Path, tmp_path: Path) -> None:
    """Trained on after its end, and branched before its decay: bit for bit the whole runs."""
    averages = {"model.ema_decay": "[0.5, 0.9]"}
    rates = {"schedule.name": "sqrt", "schedule.decay": "6 steps", "schedule.warmup": "3 steps"}
    rates |= averages
    for length in (16, 24):
        whole = {**RESNET, **rates, "run.length": f"{length} steps"}
        assert exit_code(words(digits, tmp_path / f"{length}", whole)) == 0
    steady = RESNET | averages | {"schedule.name": "constant", "schedule.warmup": "3 steps"}
    assert exit_code(words(digits, tmp_path / "steady", steady | {"run.length": "10 steps"})) == 0
    steady_run = tmp_path / "steady"  # of which the latest checkpoint counts, not the best
    for length, last in ((16, str(steady_run)), (24, str(newest(steady_run)))):
        folder, branch = tmp_path / f"branch-{length}", {"run.length": f"{length} steps"}
        assert exit_code(words(digits, folder, RESNET, rates, branch, {"run.resume": last})) == 0
        assert curve(folder, "train")[11] == curve(tmp_path / f"{length}", "train")[11]
        ours, theirs = newest(folder), newest(tmp_path / f"{length}")
        for name in ("model", "ema-0.5", "ema-0.9"):
            both = [(path / f"{name}.safetensors").read_bytes() for path in (ours, theirs)]
            assert both[0] == both[1], name


def claim(folder: RunDirectory, config: RunConfig, train: str) -> None:
    """Make the directory a run's, and leave it."""
    with claim_directory(folder, config, {"train": train, "val": "b"}, World()):
        pass


def test_a_run_that_has_nothing_to_show_takes_another_recipe(digits: Path, tmp_path: Path) -> None:
    """Without a checkpoint and without a figure; what happened to it stays on record."""
    folder = RunDirectory(tmp_path)
    config = recipe(digits)
    claim(folder, config, "a")
    folder.metrics.write_text('{"kind": "event", "event": "smaller micro-batch", "step": 0}\n')
    other = load_recipe(str(folder.recipe), {"optim.lr": "0.5"})
    claim(folder, other, "c")
    assert load_recipe(str(folder.recipe)) == other
    assert json.loads(folder.environment.read_text())["fingerprints"]["train"] == "c"
    assert "smaller micro-batch" in folder.metrics.read_text()


@pytest.mark.parametrize("what", ["a checkpoint", "a figure", "a bad image"])
def test_a_run_that_has_something_to_show_insists(what: str, digits: Path, tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path)
    config = recipe(digits)
    claim(folder, config, "a")
    if what == "a checkpoint":
        (folder.checkpoints / "step-00000001").mkdir(parents=True)
    elif what == "a figure":
        folder.metrics.write_text('{"kind": "event", "step": 0}\n{"kind": "train", "step": 1}\n')
    else:
        folder.quarantine.write_text('{"split": "train", "id": 3}\n')
    other = load_recipe(str(folder.recipe), {"optim.lr": "0.5"})
    with pytest.raises(CheckpointError, match=r"another recipe \(optim.lr"):
        claim(folder, other, "a")
    with pytest.raises(DataError, match="the train data differs from the data"):
        claim(folder, config, "c")
    claim(folder, config, "a")


def test_a_second_run_is_refused_from_the_moment_that_the_first_has_its_recipe(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second starts when the first has written its recipe, and nothing else yet."""
    folder = RunDirectory(tmp_path / "run")
    short = recipe(digits, {"run.length": "2 steps"})
    other = recipe(digits, {"run.length": "2 steps", "optim.lr": "0.5"})
    console = Console(quiet=True)

    def write_and_be_followed(path: Path, text: str) -> None:
        write_text(path, text)
        if path == folder.recipe:
            monkeypatch.undo()
            with pytest.raises(CheckpointError, match="another process trains in it"):
                train(other, folder.path, world=World(), console=console)

    monkeypatch.setattr("trainyard.run.resume.write_text", write_and_be_followed)
    train(short, folder.path, world=World(), console=console)
    assert load_recipe(str(folder.recipe)) == short


def test_ranks_of_a_launcher_wait_for_those_before(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRAINYARD_LAUNCHER", "1")
    folder, config = RunDirectory(tmp_path), recipe(digits)
    fingerprints = {"train": "a", "val": "b"}
    held = ExitStack()
    held.enter_context(claim_directory(folder, config, fingerprints, World()))
    monkeypatch.setattr("time.sleep", lambda _: held.close())
    with claim_directory(folder, config, fingerprints, World()):
        assert "another process trains in it" in capsys.readouterr().err
        monkeypatch.setattr("trainyard.run.resume._PATIENCE_S", 0)
        with pytest.raises(CheckpointError, match="another process"):
            claim(folder, config, "a")


# --- a full disk ---


def test_a_full_disk_ends_the_run_and_it_goes_on_later(
    uninterrupted: dict[str, Path],
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, begin = tmp_path / "run", saver.begin
    arguments = words(digits, folder, RESNET)

    def begin_with_little_room(final: Path) -> Path:
        if final.name == "step-00000010":
            full.enter_context(full_disk(20_000))
        return begin(final)

    with ExitStack() as full, monkeypatch.context() as patch:
        patch.setattr(saver, "begin", begin_with_little_room)
        assert run(*arguments) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"trainyard: .*/run/checkpoints/step-00000010: File too large: [\d.]+ MB needed, .* free; "
        r"raise the limit of `ulimit -f`, or choose another file system\n",
        said,
    )
    assert newest(folder).name == "step-00000008"
    assert exit_code(arguments) == 0
    assert_same_end(folder, uninterrupted["batch norm"])


@pytest.mark.parametrize("name", ["environment.json", "recipe.toml"])
def test_a_disk_that_is_full_when_the_run_starts(
    name: str,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert run(*words(digits, tmp_path / "run")) == 1
    said = capsys.readouterr().err
    pattern = rf"trainyard: .*/run/{name}: No space left on device: [\d,]+ bytes needed, .* free;.*"
    assert re.fullmatch(pattern + "\n", said)
    assert not (tmp_path / "run" / name).exists()


# --- what the last bits depend on ---


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"ranks": "2", "a rank's device": "1 thread, AVX2"}, None),  # no promise is made
        (
            {"a rank's device": "1 thread, AVX2"},
            r"bit for bit.*device: 2 threads, AVX2 -> 1 thread, AVX2$",
        ),
        ({"batch.micro": "4"}, r"batch\.micro: auto -> 4; batch norm normalises by the images"),
    ],
)
def test_other_bits_are_expected(change: dict[str, str], said: str | None, tmp_path: Path) -> None:
    """98.9% became 97.0% by another batch.micro, and 96.43% 96.15% by threads, without a word."""
    before = {"ranks": "1", "a rank's device": "2 threads, AVX2", "batch.micro": "auto"}
    saved, state, events = state_at(3), state_at(0), list[dict[str, Any]]()
    saved.conditions, state.conditions = before, before | change
    save_checkpoint(saved, RunDirectory(tmp_path).checkpoints, keep=1)
    resume("auto", RunDirectory(tmp_path), state, world=World(), report=events.append)
    assert state.step == 3
    messages = [event["message"] for event in events if event["event"] == "rounding"]
    assert len(messages) == (said is not None)
    assert said is None or re.search(said, messages[0])


@pytest.mark.parametrize("longer", ["saved", "state"])
def test_conditions_of_another_release(longer: str, tmp_path: Path) -> None:
    """A condition that this release lacks was a KeyError, and the run could not go on."""
    states = {"saved": state_at(3), "state": state_at(0)}
    for name, state in states.items():
        state.conditions = {"ranks": "1", "torch": "2"} | ({"other": "x"} if name == longer else {})
    save_checkpoint(states["saved"], RunDirectory(tmp_path).checkpoints, keep=1)
    events = list[dict[str, Any]]()
    resume("auto", RunDirectory(tmp_path), states["state"], world=World(), report=events.append)
    assert [event["event"] for event in events] == ["resumed"]


def test_conditions_of_a_run(uninterrupted: dict[str, Path]) -> None:
    found = progress(newest(uninterrupted["batch norm"]))["conditions"]
    assert found["ranks"] == "1" and found["batch.micro"] == "auto"
    assert re.fullmatch(r"\d+ threads?, \w+", found["a rank's device"])


# --- what is not ours ---


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "stacks/rank-00000.txt"])
def test_a_link_in_a_run_of_somebody_else_leads_nowhere(
    name: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's file that it led to was cut to its last whole line, or overwritten."""
    secret, link = tmp_path / "secret", tmp_path / "run" / name
    text = '{"kind": "event"}\n{"kind": "event", "no line end'
    secret.write_text(text)
    link.parent.mkdir(parents=True)
    link.symlink_to(secret)
    assert run(*words(digits, tmp_path / "run")) == 2
    assert capsys.readouterr().err == f"trainyard: {link}: a link: remove it\n"
    assert secret.read_text() == text


@pytest.mark.parametrize("content", ["[]", "{}", '{"fingerprints": ["a"]}', "nonsense"])
def test_an_environment_that_is_not_ours(content: str, digits: Path, tmp_path: Path) -> None:
    folder, config = RunDirectory(tmp_path), recipe(digits)
    claim(folder, config, "a")
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    folder.environment.write_text(content)
    with pytest.raises(CheckpointError, match=r"environment\.json cannot be read"):
        claim(folder, config, "a")


def test_what_is_in_the_way_of_a_run_is_named(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim(RunDirectory(tmp_path), recipe(digits), "a")
    (tmp_path / "stacks").touch()
    assert run(*words(digits, tmp_path)) == 1
    assert capsys.readouterr().err == f"trainyard: {tmp_path / 'stacks'}: File exists\n"


FILES_OF_A_RUN = (
    *("recipe.toml", "environment.json", "metrics.jsonl", "quarantine.jsonl", "trackers.json"),
    *("predictions.npz", ".lock"),
)


@pytest.mark.parametrize("name", FILES_OF_A_RUN)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path.name, path)])
def test_what_is_no_file_is_named(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    """`train` waited for ever for somebody to write into a pipe."""
    make(tmp_path / name)
    (tmp_path / "checkpoints").mkdir()
    for look in (
        lambda: is_new_run("auto", RunDirectory(tmp_path), World()),
        lambda: check_run(tmp_path),
        lambda: find_checkpoint(tmp_path),
    ):
        with pytest.raises(InputError, match=f"{name}: is no regular file"):
            look()


def test_a_recipe_that_is_gone(digits: Path, tmp_path: Path) -> None:
    """The run went on with any recipe, seed and rate, and wrote that down as if always so."""
    folder, config = RunDirectory(tmp_path), recipe(digits)
    claim(folder, config, "a")
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    folder.recipe.unlink()
    with pytest.raises(CheckpointError, match=r"recipe\.toml is missing.*--run\.resume"):
        claim(folder, config, "a")
    assert not folder.recipe.exists()


@pytest.mark.slow
def test_a_run_goes_on_beside_what_is_no_checkpoint(
    uninterrupted: dict[str, Path],
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A remark names it, once; the run saves as if it were not there."""
    folder = tmp_path / "run"
    arguments = words(digits, folder, RESNET)
    assert exit_code(arguments, stop_at=12, number=signal.SIGTERM) == Stopped.exit_code
    (folder / "checkpoints" / "step-00000099").write_text("")
    damaged = folder / "checkpoints" / "step-00000010" / "progress.json"
    damaged.write_text("[]")
    assert exit_code(arguments) == 0
    (remark,) = events(folder, "bad checkpoint")
    assert remark["message"].endswith("step-00000099: is not a folder; taking the one before it")
    (folder / "checkpoints" / "step-00000099").unlink()
    assert_same_end(folder, uninterrupted["batch norm"])


def test_a_broken_last_line_is_dropped(
    uninterrupted: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    """What a power cut in the middle of a line leaves behind."""
    folder = Path(shutil.copytree(uninterrupted["batch norm"], tmp_path / "run", symlinks=True))
    before = read(folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert exit_code(words(digits, folder, RESNET)) == 0
    assert read(folder)[: len(before)] == before


# --- several ranks: the same stream, and the same losses but for the order of sums ---


def plan_of(config: RunConfig) -> EndlessPlan:
    train = config.data.train
    assert train is not None
    index = open_merged([train] if isinstance(train, str) else train, None)
    return training_plan(config.data, index, global_batch=config.batch.size, seed=config.run.seed)


def expected_stream(config: RunConfig, start: int, end: int) -> dict[int, list[int]]:
    """The global batches of the plan, whoever takes which share of them."""
    plan = plan_of(config)
    return {step: plan.batch(step).tolist() for step in range(start, end)}


@pytest.fixture(scope="module")
def two_killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two ranks in each order, killed in step 14, after the checkpoint of step 10."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(data)
        for order in (*ORDERS, "plain"):
            config = load_recipe("debug", OPTIONS | ORDERS.get(order, IN_ORDER))
            folders[order] = tmp_path_factory.mktemp("two-killed")
            with pytest.raises(AssertionError):
                spawn(train_on, 2, config, folders[order] / "run", 13)
            assert noted(folders[order]) == expected_stream(config, 0, 13)
    return folders


@pytest.fixture(scope="module")
def two_ranks(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two ranks."""
    folder = tmp_path_factory.mktemp("two-ranks") / "run"
    spawn(train_on, 2, recipe(digits), folder, None)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "order"), [(1, "plain"), (2, "plain"), (3, "plain"), *((3, order) for order in ORDERS)]
)
def test_two_ranks_go_on_as_another_number(
    size: int,
    order: str,
    two_killed: dict[str, Path],
    two_ranks: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(data)
    config = load_recipe("debug", OPTIONS | ORDERS.get(order, IN_ORDER))
    folder = Path(shutil.copytree(two_killed[order] / "run", tmp_path / "run", symlinks=True))
    resumed = interleaved(spawn(train_on, size, config, folder, None))
    assert resumed == expected_stream(config, 10, NUM_STEPS)
    if order == "plain":
        losses, expected = (curve(each, "train", "loss") for each in (folder, two_ranks))
        assert losses.keys() == expected.keys()
        for step, loss in expected.items():
            assert losses[step] == pytest.approx(loss, rel=1e-5)


def train_without_loader(world: World, config: RunConfig, folder: Path) -> None:
    """The last rank's loader process is killed in the midst of step 5."""

    def kill_loader(_: TrainStep, batch: Any, step: int) -> None:
        if step == 4 and world.rank == world.size - 1:
            (loader,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(loader), signal.SIGKILL)

    on_each_step(before=kill_loader)
    train_joined(config, folder, world)


@pytest.mark.slow
def test_a_loader_that_dies_on_one_rank_ends_all(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"loader process died|another rank is gone"):
        spawn(train_without_loader, 2, recipe(digits), tmp_path / "run")
