"""How many ranks there are on a machine, and whether they train on its GPUs."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.command_line import Capture, run
from tests.gpus import pretend
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
