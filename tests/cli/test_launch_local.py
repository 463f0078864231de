"""How many ranks there are on a machine, and whether they train on its GPUs."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.command_line import Capture, run
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


@pytest.mark.parametrize(
    ("num_gpus", "launcher", "is_told"), [(1, "", False), (4, "", True), (4, "local", False)]
)
def test_train_names_the_line_that_uses_all_gpus(
    num_gpus: int,
    launcher: str,
    is_told: bool,
    digits: Path,
    tmp_path: Path,
    started: list[tuple[int, str | None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TrainyardError("test.stopped", "before the training")

    monkeypatch.setattr("trainyard.run.trainer.train", fail)
    monkeypatch.setattr(train, "end_with_launcher", lambda: None)
    if launcher:
        monkeypatch.setenv("TRAINYARD_LAUNCHER", launcher)
    pretend(monkeypatch, num_gpus)
    words = ("debug", "--data", digits, "--run", tmp_path / "a run", "--plain", "--optim.lr", "0.1")
    assert run("train", *words) == 1
    lines = re.findall(r"trainyard (launch local .*)", capsys.readouterr().out)
    assert len(lines) == is_told
    for line in lines:
        assert run(*shlex.split(line), "--dry-run") == 0
        assert f"--run '{tmp_path}/a run' " in line and "--plain --optim.lr=0.1" in line
        assert run(*shlex.split(line)) == 0
        assert started == [(4, None)]
