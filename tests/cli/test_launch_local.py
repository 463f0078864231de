"""How many ranks there are on a machine, and whether they train on its GPUs."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.command_line import Capture, run
from tests.errors import check, refused
from tests.gpus import pretend
from trainyard.cli import train
from trainyard.errors import TrainyardError
from trainyard.launch import elastic

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str | None]]:
    """Of each start the number of ranks, and the GPUs that they are let see (None: all)."""
    found: list[tuple[int, str | None]] = []

    def run_ranks(command: object, ranks: int, *_: object, **__: object) -> int:
        found.append((ranks, os.environ.get("CUDA_VISIBLE_DEVICES")))
        return 0

    monkeypatch.setattr(elastic, "run_ranks", run_ranks)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # to be put back afterwards
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return found


@pytest.mark.parametrize(
    ("num_gpus", "wanted"), [(0, (2, None)), (1, (2, "")), (2, (2, None)), (8, (2, None))]
)
def test_the_demo_trains_two_ranks_on_any_machine(
    num_gpus: int,
    wanted: tuple[int, str | None],
    started: list[tuple[int, str | None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """By two GPUs, or on the CPU, which is told where there is a GPU."""
    (words,) = re.findall(r"trainyard (launch .*)", MAKEFILE.split("\ndemo:")[1].split("\n\n")[0])
    pretend(monkeypatch, num_gpus)
    assert run(*shlex.split(words)) == 0
    assert started == [wanted]
    told = capsys.readouterr().err
    assert bool(told) == (num_gpus == 1)


@pytest.mark.parametrize(("num_gpus", "ranks"), [(0, 1), (1, 1), (2, 2), (8, 8)])
def test_a_rank_for_each_gpu_or_one(
    num_gpus: int,
    ranks: int,
    started: list[tuple[int, str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, num_gpus)
    assert run("launch", "local", "digits") == 0
    assert started == [(ranks, None)]


@pytest.fixture
def trained(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """A command that trains up to its first step, which fails."""

    def fail(*_: object, **__: object) -> None:
        raise TrainyardError("test.stopped", "before the training")

    monkeypatch.setattr("trainyard.run.trainer.train", fail)
    monkeypatch.setattr(train, "end_with_launcher", lambda: None)
    where = ("--data", digits, "--run", tmp_path / "a run")
    return ("train", "debug", *where, "--plain", "--optim.lr", "0.1")


@pytest.mark.parametrize(
    ("num_gpus", "launcher", "is_told"), [(1, "", False), (4, "", True), (4, "local", False)]
)
def test_train_names_the_line_that_uses_all_gpus(
    num_gpus: int,
    launcher: str,
    is_told: bool,
    trained: tuple[object, ...],
    tmp_path: Path,
    started: list[tuple[int, str | None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    if launcher:
        monkeypatch.setenv("TRAINYARD_LAUNCHER", launcher)
    pretend(monkeypatch, num_gpus)
    assert run(*trained) == 1
    lines = re.findall(r"trainyard (train .*)", capsys.readouterr().out)
    assert len(lines) == is_told
    for line in lines:
        assert f"--run '{tmp_path}/a run' " in line and "--plain --optim.lr=0.1" in line
        assert run(*shlex.split(line)) == 0
        assert started == [(4, None)]


@pytest.mark.parametrize("number", [1, 2])
def test_train_starts_a_rank_for_each_gpu_that_is_asked_for(
    number: int,
    trained: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """By the command of `launch local`; one GPU is this process's."""
    commands: list[tuple[object, int]] = []

    def run_ranks(command: object, ranks: int, *_: object, **__: object) -> int:
        commands.append((command, ranks))
        return 75

    monkeypatch.setattr(elastic, "run_ranks", run_ranks)
    pretend(monkeypatch, 4)
    assert run(*trained, "--gpus", number) == (1 if number == 1 else 75)
    assert "GPUs are visible" not in capsys.readouterr().out
    if number > 1:
        assert run("launch", "local", *trained[1:], "--gpus", number) == 75
        one, other = commands
        assert one == other


@pytest.mark.parametrize(("num_gpus", "wanted"), [(0, 1), (0, 2), (1, 2)])
def test_train_refuses_gpus_that_are_not_there(
    num_gpus: int, wanted: int, trained: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, num_gpus)
    error = refused(*trained, "--gpus", wanted)
    check(error, "launch.too-few-gpus", num_gpus=num_gpus, num_wanted=wanted)


@pytest.mark.parametrize(
    "variables",
    [
        {"TRAINYARD_LAUNCHER": "1"},
        {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
        | {"SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
    ],
    ids=["trainyard", "torchrun", "srun"],
)
def test_a_rank_does_not_start_others(
    variables: dict[str, str], trained: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of N ranks would have started N."""
    pretend(monkeypatch, 4)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check(refused(*trained, "--gpus", 2), "launch.gpus-of-a-rank", num_gpus=2)
