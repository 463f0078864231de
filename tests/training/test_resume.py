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
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.command_line import newest, run
from tests.full_disk import full_disk
from tests.spawn import _CONTEXT, end_by, spawn, train_joined
from trainyard.config import RunConfig, load_recipe
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.errors import CheckpointError, DataError, Requeued, Stopped
from trainyard.files import RunDirectory, write_text
from trainyard.run.resume import claim_directory
from trainyard.run.train import train
from trainyard.training import keeping
from trainyard.training.step import Batch, StepStats, TrainStep
from trainyard.world import World

NUM_STEPS = 24  # of 64 samples: an epoch of 1,433 ends in step 23
OPTIONS = {
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "5 steps",
    "run.eval_every": "8 steps",
    "run.log_every": "1 step",
    "batch.size": "64",
    "data.threads": "1",
}
MODELS = {
    "batch norm": {"model.name": "test_resnet"},
    "stochastic depth": {"model.name": "test_vit", "model.drop_path": "0.3"},
}

Lines = list[dict[str, Any]]


def words(digits: Path, folder: Path, *changes: dict[str, str]) -> list[str]:
    """The command that trains in `folder`."""
    options = dict(OPTIONS)
    for change in changes:
        options |= change
    keys = [word for key, value in options.items() for word in (f"--{key}", value)]
    return ["train", "debug", "--data", str(digits), "--run", str(folder), "--json", *keys]


# --- starting a run in a process of its own, and cutting it off ---


def command(arguments: list[str], stop_at: int | None = None, number: int = 0) -> None:
    """What `python -m trainyard` does, and a signal to itself in the midst of step `stop_at`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    update = TrainStep.__call__

    def update_and_signal(self: TrainStep, batch: Batch, step: int, rates: Any) -> StepStats:
        stats = update(self, batch, step, rates)
        if step + 1 == stop_at:
            end_by(number)
        return stats

    TrainStep.__call__ = update_and_signal  # type: ignore[method-assign]
    sys.exit(run(*arguments))


def exit_code(arguments: list[str], stop_at: int | None = None, number: int = 0) -> int:
    """A process forked from one that has loaded torch already: seconds less than a fresh one."""
    process = _CONTEXT.Process(target=command, args=(arguments, stop_at, number))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def kill_at(step: int, metrics: Path, process: Any, is_alive: Callable[[], bool]) -> None:
    """SIGKILL a little after the process reports a step, wherever it may be by then."""
    known = metrics.stat().st_size if metrics.exists() else 0
    while is_alive():
        new = metrics.read_bytes()[known:] if metrics.exists() else b""
        lines = [json.loads(line) for line in new.split(b"\n")[:-1]]  # the last one may grow yet
        if any(line["kind"] == "train" and line["step"] >= step for line in lines):
            break
        time.sleep(0.001)
    time.sleep(random.Random(step).uniform(0, 0.05))
    process.kill()


# --- what came of it ---


def read(metrics: Path) -> Lines:
    """Every line of metrics.jsonl, each of them whole."""
    text = metrics.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def curve(folder: Path, kind: str, *keys: str) -> dict[int, list[float]]:
    """The last word of metrics.jsonl on each step."""
    lines = read(folder / "metrics.jsonl")
    return {line["step"]: [line[k] for k in keys] for line in lines if line["kind"] == kind}


def assert_same_end(folder: Path, uninterrupted: Path, num_steps: int = NUM_STEPS) -> None:
    """Weights, optimizer and evaluations, bit for bit."""
    ours, theirs = newest(folder), newest(uninterrupted)
    assert ours.name == theirs.name == f"step-{num_steps:08d}"
    weights = [(path / "model.safetensors").read_bytes() for path in (ours, theirs)]
    assert weights[0] == weights[1]
    states = [torch.load(path / "training.pt", weights_only=True) for path in (ours, theirs)]
    for group in [group for state in states for group in state["optimizer"]["param_groups"]]:
        del group["lr"]  # is set before each step, and after the last one means nothing
    assert_equal(*states)
    progress = [json.loads((path / "progress.json").read_text()) for path in (ours, theirs)]
    for part in progress:
        del part["clock"]
    assert progress[0] == progress[1]
    assert progress[0]["last"]["step"] == num_steps
    assert curve(folder, "val", "top1", "top5", "loss") == curve(
        uninterrupted, "val", "top1", "top5", "loss"
    )
    assert curve(folder, "train", "loss", "lr") == curve(uninterrupted, "train", "loss", "lr")


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_equal(mine, yours)
    else:
        assert one == other


@pytest.fixture(scope="module")
def uninterrupted(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each model that nothing happened to."""
    folders = {}
    for name, change in MODELS.items():
        folders[name] = tmp_path_factory.mktemp("uninterrupted") / "run"
        assert exit_code(words(digits, folders[name], change)) == 0
    return folders


# --- one rank: the same, bit for bit ---


@pytest.mark.parametrize("model", MODELS)
def test_killed_at_random_steps(
    model: str, uninterrupted: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    arguments = words(digits, tmp_path / "run", MODELS[model])
    metrics = tmp_path / "run" / "metrics.jsonl"
    for step in sorted(random.Random(model).sample(range(1, NUM_STEPS - 3), 3)):
        process = _CONTEXT.Process(target=command, args=(arguments,))
        process.start()
        kill_at(step, metrics, process, process.is_alive)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert step in curve(tmp_path / "run", "train", "loss")  # and every line is whole
    assert exit_code(arguments) == 0
    assert_same_end(tmp_path / "run", uninterrupted[model])


def test_killed_as_a_command(uninterrupted: dict[str, Path], digits: Path, tmp_path: Path) -> None:
    """The real thing: `python -m trainyard train`, kill -9, the same command again."""
    python = [sys.executable, "-m", "trainyard"]
    arguments = python + words(digits, tmp_path / "run", MODELS["batch norm"])
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        kill_at(13, metrics, process, lambda: process.poll() is None)
    assert process.returncode == -signal.SIGKILL
    again = subprocess.run(arguments, stdout=subprocess.PIPE, check=True)
    assert json.loads(again.stdout)["step"] == NUM_STEPS
    assert_same_end(tmp_path / "run", uninterrupted["batch norm"])
    (resumed,) = [line for line in read(metrics) if line.get("event") == "resumed"]
    assert resumed["step"] in (8, 10)  # saved at 10, or killed on the way


STOPS = {
    "in an epoch": (11, signal.SIGTERM),
    "at a save": (10, signal.SIGTERM),
    "at an evaluation": (16, signal.SIGTERM),
    "after the first step": (1, signal.SIGUSR2),
    "after the last step": (NUM_STEPS, signal.SIGTERM),
}


@pytest.mark.parametrize("when", STOPS)
def test_stopped_by_a_signal(
    when: str, uninterrupted: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    step, number = STOPS[when]
    arguments = words(digits, tmp_path / "run", MODELS["batch norm"])
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
    progress = json.loads((newest(tmp_path / "run") / "progress.json").read_text())
    assert progress["best"]["step"] == 8
    assert progress["last"]["step"] == 16
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "val"] == [8, 16]


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
    assert exit_code(words(digits, folder, MODELS["batch norm"])) == 0
    assert best.readlink() == right


# --- run.resume ---


def test_never(uninterrupted: dict[str, Path], digits: Path, tmp_path: Path) -> None:
    never = {**MODELS["batch norm"], "run.resume": "never"}
    assert exit_code(words(digits, tmp_path / "run", never)) == 0
    assert_same_end(tmp_path / "run", uninterrupted["batch norm"])
    assert exit_code(words(digits, tmp_path / "run", never)) == 2  # it has checkpoints now


def test_from_a_checkpoint_of_another_run(
    uninterrupted: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    start = uninterrupted["batch norm"] / "checkpoints" / "step-00000016"
    begin = {**MODELS["batch norm"], "run.resume": str(start)}
    arguments = words(digits, tmp_path / "run", begin)
    assert exit_code(arguments, stop_at=21, number=signal.SIGTERM) == Stopped.exit_code
    assert exit_code(arguments) == 0  # goes on from its own checkpoint, not from the other's again
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(17, NUM_STEPS + 1))
    ours, theirs = newest(tmp_path / "run"), newest(uninterrupted["batch norm"])
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


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
    with pytest.raises(DataError, match="the train data is not what"):
        claim(folder, config, "c")
    claim(folder, config, "a")


def test_a_second_run_is_refused_from_the_moment_that_the_first_has_its_recipe(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second starts when the first has written its recipe, and nothing else yet."""
    folder = RunDirectory(tmp_path / "run")
    short = recipe(digits, **{"run.length": "2 steps"})
    other = recipe(digits, **{"run.length": "2 steps", "optim.lr": "0.5"})
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
    folder, begin = tmp_path / "run", keeping.begin
    arguments = words(digits, folder, MODELS["batch norm"])

    def begin_with_little_room(final: Path) -> Path:
        if final.name == "step-00000010":
            full.enter_context(full_disk(20_000))
        return begin(final)

    with ExitStack() as full, monkeypatch.context() as patch:
        patch.setattr(keeping, "begin", begin_with_little_room)
        assert run(*arguments) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"trainyard: .*/run/checkpoints/step-00000010: File too large: [\d.]+ MB needed, .* free; "
        r"free some space and give the command again\n",
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


# --- what is not ours ---


@pytest.mark.parametrize("content", ["[]", "{}", '{"fingerprints": ["a"]}', "nonsense"])
def test_an_environment_that_is_not_ours(content: str, digits: Path, tmp_path: Path) -> None:
    folder, config = RunDirectory(tmp_path), recipe(digits)
    claim(folder, config, "a")
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    folder.environment.write_text(content)
    with pytest.raises(CheckpointError, match=r"environment\.json cannot be read"):
        claim(folder, config, "a")


@pytest.mark.parametrize(
    ("name", "is_folder", "said"),
    [("metrics.jsonl", True, "Is a directory"), ("stacks", False, "File exists")],
)
def test_what_is_in_the_way_of_a_run_is_named(
    name: str,
    is_folder: bool,
    said: str,
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    claim(RunDirectory(tmp_path), recipe(digits), "a")
    (tmp_path / name).mkdir() if is_folder else (tmp_path / name).touch()
    assert run(*words(digits, tmp_path)) == 1
    assert capsys.readouterr().err == f"trainyard: {tmp_path / name}: {said}\n"


def test_a_run_goes_on_beside_what_is_no_checkpoint(
    uninterrupted: dict[str, Path],
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A remark names it, once; the run saves as if it were not there."""
    folder = tmp_path / "run"
    arguments = words(digits, folder, MODELS["batch norm"])
    assert exit_code(arguments, stop_at=12, number=signal.SIGTERM) == Stopped.exit_code
    (folder / "checkpoints" / "step-00000099").write_text("")
    damaged = folder / "checkpoints" / "step-00000010" / "progress.json"
    damaged.write_text("[]")
    assert exit_code(arguments) == 0
    events = [line for line in read(folder / "metrics.jsonl") if line.get("event")]
    remarks = [line["message"] for line in events if line["event"] == "bad checkpoint"]
    assert len(remarks) == 1
    assert remarks[0].endswith("step-00000099: is no folder; taking the one before it")
    (folder / "checkpoints" / "step-00000099").unlink()
    assert_same_end(folder, uninterrupted["batch norm"])


# --- metrics.jsonl ---


def test_a_broken_last_line_is_dropped(
    uninterrupted: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    """What a power cut in the middle of a line leaves behind."""
    folder = Path(shutil.copytree(uninterrupted["batch norm"], tmp_path / "run", symlinks=True))
    before = read(folder / "metrics.jsonl")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert exit_code(words(digits, folder, MODELS["batch norm"])) == 0
    assert read(folder / "metrics.jsonl")[: len(before)] == before


# --- several ranks: the same stream, and the same losses but for the order of sums ---


def train_on(
    world: World, config: RunConfig, folder: Path, die_at: int | None
) -> list[tuple[int, list[int]]]:
    """The ids that this rank updated with, step by step; they are written down as they come."""
    update = TrainStep.__call__
    seen: list[tuple[int, list[int]]] = []
    notes = folder.with_name(f"ids-{world.rank}.jsonl")

    def note_and_update(self: TrainStep, batch: Any, step: int, rates: Any) -> StepStats:
        if step == die_at:
            end_by(signal.SIGKILL)
        seen.append((step, batch.ids.tolist()))
        with open(notes, "a") as file:
            file.write(json.dumps(seen[-1]) + "\n")
        return update(self, batch, step, rates)

    TrainStep.__call__ = note_and_update  # type: ignore[method-assign]
    train_joined(config, folder, world)
    return seen


def recipe(digits: Path, **changes: str) -> RunConfig:
    data = {"data.train": str(digits / "train"), "data.val": str(digits / "val")}
    return load_recipe("debug", OPTIONS | data | changes)


def interleaved(ranks: list[list[tuple[int, list[int]]]]) -> dict[int, list[int]]:
    """Whole batches by step, from those of each rank."""
    stream = {}
    for parts in zip(*ranks, strict=True):
        (step,) = {step for step, _ in parts}
        ids = np.zeros(sum(len(ids) for _, ids in parts), int)
        for rank, (_, share) in enumerate(parts):
            ids[rank :: len(parts)] = share
        stream[step] = ids.tolist()
    return stream


def noted(folder: Path) -> dict[int, list[int]]:
    paths = sorted(folder.glob("ids-*.jsonl"))
    ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    return interleaved(ranks)


@pytest.fixture(scope="module")
def two_ranks(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an uninterrupted run of two ranks and what they saw."""
    folder = tmp_path_factory.mktemp("two-ranks")
    spawn(train_on, 2, recipe(digits), folder / "run", None)
    return folder


@pytest.fixture(scope="module")
def two_killed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, killed in step 14, after the checkpoint of step 10."""
    folder = tmp_path_factory.mktemp("two-killed")
    with pytest.raises(AssertionError):
        spawn(train_on, 2, recipe(digits), folder / "run", 13)
    return folder


@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_ranks_go_on_as_another_number(
    size: int, two_ranks: Path, two_killed: Path, digits: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_killed / "run", tmp_path / "run", symlinks=True)
    resumed = interleaved(spawn(train_on, size, recipe(digits), tmp_path / "run", None))
    before = noted(two_killed)
    assert list(before) == list(range(13))
    assert list(resumed) == list(range(10, NUM_STEPS))
    whole = noted(two_ranks)
    assert before | resumed == whole
    assert all(resumed[step] == before[step] for step in range(10, 13))
    losses, expected = (curve(f / "run", "train", "loss") for f in (tmp_path, two_ranks))
    differences = [abs(losses[step][0] / loss - 1) for step, (loss,) in expected.items()]
    print(f"on {size}: largest relative difference of a loss {max(differences):.2g}")
    assert max(differences) < 1e-5


def test_the_stream_is_the_plans(two_ranks: Path) -> None:
    plan = ShuffledPlan(1433, 64, seed=0)
    assert noted(two_ranks) == {step: plan.batch(step).tolist() for step in range(NUM_STEPS)}


def train_without_loader(world: World, digits: Path, folder: Path) -> None:
    """The last rank's loader process is killed in the midst of step 5."""
    update = TrainStep.__call__

    def kill_and_update(self: TrainStep, batch: Batch, step: int, rates: Any) -> StepStats:
        if step == 4 and world.rank == world.size - 1:
            (loader,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(loader), signal.SIGKILL)
        return update(self, batch, step, rates)

    TrainStep.__call__ = kill_and_update  # type: ignore[method-assign]
    train_joined(recipe(digits), folder, world)


def test_a_loader_that_dies_on_one_rank_ends_all(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"loader process died|another rank is gone"):
        spawn(train_without_loader, 2, digits, tmp_path / "run")
