"""Run directories: their owners, obstacles to a start, and changes that a resumed run accepts."""

import errno
import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import loaders
from tests.command_line import run
from tests.errors import check, raises, refused
from tests.runs import (
    NUM_STEPS,
    curve,
    events,
    on_each_step,
    recipe,
    words,
)
from tests.spawn import spawn, train_joined
from tests.steps import save_checkpoint
from tests.training.test_checkpoint import state_at
from trainyard.config import RunConfig, all_keys, load_recipe
from trainyard.course import build_course
from trainyard.files import RunDirectory, check_run, find_checkpoint, write_text
from trainyard.run.resume import (
    check_end,
    claim_directory,
    is_new_run,
    resume,
    startup_facts,
)
from trainyard.run.trainer import train
from trainyard.training.step import TrainStep
from trainyard.world import World

# --- a directory and the run that it belongs to ---


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
    with raises("run.recipe-differs", path=tmp_path, changes="optim.lr: 0.004 -> 0.5"):
        claim(folder, other, "a")
    with raises("run.data-differs", split="train"):
        claim(folder, config, "c")
    claim(folder, config, "a")


def test_a_named_run_goes_on_also_to_another_end(digits: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    assert run(*words(digits, run_folder, {"run.length": "2 steps"})) == 0
    for folder in (run_folder, f"{run_folder}/"):
        assert run("train", folder, "--quiet") == 0
    assert [*curve(run_folder, "train")][-1] == 2
    assert run("train", run_folder, "--run.length", "4 steps", "--quiet") == 0
    assert [*curve(run_folder, "train")] == [1, 2, 3, 4]
    (event,) = events(run_folder, "new end")
    assert (event["step"], event["message"]) == (2, "run.length: 2 steps -> 4 steps")
    assert load_recipe(str(RunDirectory(run_folder).recipe)).run.length == "4 steps"
    (tmp_path / "moved").symlink_to(digits)
    assert run("train", run_folder, "--data", tmp_path / "moved", "--quiet") == 0
    assert load_recipe(str(RunDirectory(run_folder).recipe)).data.val == f"{tmp_path}/moved/val"
    for change in (("--optim.lr", "1"), ("--schedule.image_size", '["1 steps: 48"]')):
        more = (*change, "--run.length", "6 steps")
        check(refused("train", run_folder, *more), "run.recipe-differs", hint="")


def test_a_run_does_not_end_before_its_checkpoint(digits: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(*words(digits, first, {"run.length": "3 steps"})) == 0
    files = [first / "recipe.toml", first / "metrics.jsonl"]
    before = [file.read_bytes() for file in files]
    beyond = {"length": "2 steps", "num_steps": 2, "step": 3}
    check(refused("train", first, "--run.length", "2 steps"), "run.beyond-end", **beyond)
    assert [file.read_bytes() for file in files] == before
    shorter = words(digits, second, {"run.length": "2 steps", "run.resume": str(first)})
    check(refused(*shorter), "run.beyond-end", **beyond)


def test_only_more_passes_than_wanted_are_beyond_the_end() -> None:
    course = build_course("1 epochs", epoch_samples=10, batch=2, image_size=8)
    check_end(course, 7, {"ends": [7]})  # ranks of different numbers of samples
    with raises("run.beyond-end", step=14):
        check_end(course, 14, {"ends": [7, 14]})


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
            with raises("run.in-use", path=folder.path):
                train(other, folder.path, world=World(), console=console)

    monkeypatch.setattr("trainyard.run.resume.write_text", write_and_be_followed)
    train(short, folder.path, world=World(), console=console)
    assert load_recipe(str(folder.recipe)) == short


def test_ranks_of_a_launcher_wait_for_those_before(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_LAUNCHER", "1")
    folder, config = RunDirectory(tmp_path), recipe(digits)
    fingerprints = {"train": "a", "val": "b"}
    held = ExitStack()
    held.enter_context(claim_directory(folder, config, fingerprints, World()))
    monkeypatch.setattr("time.sleep", lambda _: held.close())
    with (
        claim_directory(folder, config, fingerprints, World()),
        raises("run.in-use"),
        claim_directory(folder, config, fingerprints, World(), patience_s=0),
    ):
        pass


# --- a full disk ---


@pytest.mark.parametrize("name", ["environment.json", "recipe.toml"])
def test_a_disk_that_is_full_when_the_run_starts(
    name: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with raises("disk.full", path=tmp_path / "run" / name):
        train(recipe(digits), tmp_path / "run", world=World(), console=Console(quiet=True))
    assert not (tmp_path / "run" / name).exists()


# --- what the last bits depend on ---


@pytest.mark.parametrize(
    ("change", "warns"),
    [
        ({}, False),
        ({"ranks": "2", "a rank's device": "1 thread, AVX2"}, False),  # no promise is made
        ({"a rank's device": "1 thread, AVX2"}, True),
        ({"batch.micro": "4"}, True),
    ],
)
def test_other_bits_are_expected(change: dict[str, str], warns: bool, tmp_path: Path) -> None:
    """98.9% became 97.0% by another batch.micro, and 96.43% 96.15% by threads, without a word."""
    before = {"ranks": "1", "a rank's device": "2 threads, AVX2", "batch.micro": "auto"}
    saved, state, events = state_at(3), state_at(0), list[dict[str, Any]]()
    saved.conditions, state.conditions = before, before | change
    save_checkpoint(saved, RunDirectory(tmp_path).checkpoints, keep=1)
    resume("auto", RunDirectory(tmp_path), state, world=World(), report=events.append)
    assert state.step == 3
    messages = [event["message"] for event in events if event["event"] == "rounding"]
    assert len(messages) == warns
    for key, value in change.items():
        assert not warns or f"{key}: {before[key]} -> {value}" in messages[0]


def test_a_run_that_starts_from_another_has_no_evaluation_yet(tmp_path: Path) -> None:
    saved, state, (first, second) = state_at(3), state_at(0), (tmp_path / "a", tmp_path / "b")
    saved.last = saved.best = {"step": 3, "top1": 0.5}
    saved.stale = 1
    save_checkpoint(saved, RunDirectory(first).checkpoints, keep=1)
    resume(f"{first}", RunDirectory(second), state, world=World(), report=lambda _: None)
    assert (state.step, state.last, state.best, state.stale) == (3, {}, {}, 0)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_another_teacher_is_a_warning(ranks: str, tmp_path: Path) -> None:
    """The best checkpoint of a run that still trains was another one after a resume."""
    before = {"ranks": "1", "loss.teacher": "step-1/manifest.json 0a", "loss.class_weights": "a 1"}
    saved, state, events = state_at(3), state_at(0), list[dict[str, Any]]()
    saved.conditions = before
    state.conditions = before | {"ranks": ranks, "loss.teacher": "step-2/manifest.json 1b"}
    save_checkpoint(saved, RunDirectory(tmp_path).checkpoints, keep=1)
    resume("auto", RunDirectory(tmp_path), state, world=World(), report=events.append)
    (warning,) = [event for event in events if event.get("level") == "warning"]
    assert warning["event"] == "loss" and "class_weights" not in warning["message"]
    assert "loss.teacher: step-1/manifest.json 0a -> step-2/manifest.json 1b" in warning["message"]


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


@pytest.mark.parametrize("name", ["TRAINYARD_STARTS_BEFORE", "TORCHELASTIC_RESTART_COUNT"])
def test_a_start_anew_that_finds_no_checkpoint_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray, after the loss of the first node, where the run directory is no shared one."""
    for count, kinds in ("0", []), ("1", ["no checkpoint"]):
        monkeypatch.setenv(name, count)
        events = list[dict[str, Any]]()
        folder = RunDirectory(tmp_path)
        resume("auto", folder, state_at(0), world=World(), report=events.append)
        assert [event["event"] for event in events] == kinds


# --- what is not ours ---


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "stacks/rank-00000.txt"])
def test_a_link_in_a_run_of_somebody_else_leads_nowhere(
    name: str, digits: Path, tmp_path: Path
) -> None:
    """The user's file that it led to was cut to its last whole line, or overwritten."""
    secret, link = tmp_path / "secret", tmp_path / "run" / name
    text = '{"kind": "event"}\n{"kind": "event", "no line end'
    secret.write_text(text)
    link.parent.mkdir(parents=True)
    link.symlink_to(secret)
    check(refused(*words(digits, tmp_path / "run")), "file.is-link", path=link)
    assert secret.read_text() == text


@pytest.mark.parametrize("content", ["[]", "{}", '{"fingerprints": ["a"]}', "nonsense"])
def test_an_environment_that_is_not_ours(content: str, digits: Path, tmp_path: Path) -> None:
    folder, config = RunDirectory(tmp_path), recipe(digits)
    claim(folder, config, "a")
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    folder.environment.write_text(content)
    with raises("run.environment-unreadable", path=folder.environment):
        claim(folder, config, "a")


def test_what_is_in_the_way_of_a_run_is_named(digits: Path, tmp_path: Path) -> None:
    claim(RunDirectory(tmp_path), recipe(digits), "a")
    (tmp_path / "stacks").touch()
    with pytest.raises(FileExistsError) as found:
        train(recipe(digits), tmp_path, world=World(), console=Console(quiet=True))
    assert found.value.filename == str(tmp_path / "stacks")


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
        with raises("file.not-regular", path=tmp_path / name):
            look()


def test_a_recipe_that_is_gone(digits: Path, tmp_path: Path) -> None:
    """The run went on with any recipe, seed and rate, and wrote that down as if always so."""
    folder, config = RunDirectory(tmp_path), recipe(digits)
    claim(folder, config, "a")
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    folder.recipe.unlink()
    with raises("run.recipe-missing", path=folder.recipe):
        claim(folder, config, "a")
    assert not folder.recipe.exists()


# --- several ranks ---


def train_without_loader(world: World, config: RunConfig, folder: Path) -> None:
    """The last rank's loader process is killed in the midst of step 5."""

    def kill_loader(_: TrainStep, batch: Any, step: int) -> None:
        if step == 4 and world.rank == world.size - 1:
            (loader,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(loader), signal.SIGKILL)

    loaders.REAL.is_wanted = True  # a copy's model is a child too
    on_each_step(before=kill_loader)
    train_joined(config, folder, world)


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs could share a directory there, and nothing said so."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    folder = RunDirectory(tmp_path / "run")
    with claim_directory(folder, RunConfig(), {"train": "a", "val": "b"}, World()):
        assert str(folder.path) in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # values of other types
def test_ranks_compare_all_keys_but_those_of_a_host() -> None:
    """Ranks with other values of run.log_every or run.save_every waited for each other for ever."""
    config, passed_over = RunConfig(), []
    for key in all_keys():
        section, _, name = key.partition(".")
        values = getattr(config, section).model_copy(update={name: "another"})
        other = startup_facts(config.model_copy(update={section: values}))
        differ = [fact for fact, value in startup_facts(config).items() if value != other[fact]]
        if differ != [key]:
            passed_over.append(key)
            # Paths may differ, but not whether there is one.
            assert differ == ([f"a {key}"] if key in ("data.train", "data.val") else [])
    assert {key for key in passed_over if not key.startswith("watch.")} == {
        *("data.train", "data.val", "data.threads", "data.stage", "data.stage_gb"),
    }


@pytest.mark.slow
def test_a_loader_that_dies_on_one_rank_ends_all(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        spawn(train_without_loader, 2, recipe(digits), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints" / f"step-{NUM_STEPS:08d}").exists()
