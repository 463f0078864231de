"""A launcher is one class and one row of the table; --gpus means the same with each."""

import argparse
import io
import queue
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
from tests.gpus import pretend
from trainyard.cli.launch import LAUNCHERS
from trainyard.launch import elastic
from trainyard.launch.elastic import Policy, on_loopback, run_ranks
from trainyard.launch.exit_codes import first_cause
from trainyard.launch.job import Job
from trainyard.launch.launcher import Launcher, add_ranks, add_restarts
from trainyard.launch.output import Printer
from trainyard.launch.signals import handling, next_event


class Toy(Launcher):
    summary = "toys"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_ranks(parser, "each toy")
        add_restarts(parser)
        parser.add_argument("--toys", type=int, default=2)

    def plan(self, job: Job, options: argparse.Namespace) -> str:
        return f"{options.toys} toys: {' '.join(job.arguments)}, {options.restarts} restarts\n"

    def run(self, job: Job, options: argparse.Namespace) -> int:
        job.run.mkdir()
        return 75


def test_a_launcher_is_a_class_and_a_row(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAUNCHERS, "toy", Toy())
    folder = tmp_path / "run"
    words = ("launch", "toy", "debug", "--run", folder, "--optim.lr", "0.1", "--toys", "3")
    plan = f"--run {folder} --optim.lr=0.1"
    assert shown(capsys, *words, "--dry-run") == f"3 toys: train debug {plan}, 0 restarts\n"
    doctor = ("--restarts", 2, "--doctor", "--dry-run")
    assert shown(capsys, *words, *doctor) == f"3 toys: doctor debug {plan}, 0 restarts\n"
    check(refused(*words, "--gpus", 1, "--ranks", 2), "launch.gpus-and-ranks")
    check(refused(*words, "--optim.lr", "much"), "recipe.invalid-value", key="optim.lr")
    assert not folder.exists()
    assert run(*words) == 75
    assert folder.exists()
    with pytest.raises(SystemExit):
        run("launch", "--help")
    said = capsys.readouterr().out
    assert "toys" in said and "agent" not in said  # which is for launchers
    assert "agent" not in str(refused("launch", "agnet"))


PLANS = {
    "local": ((), "4 x "),
    "ssh": (("--hosts", "a"), "--gpus=4"),
    "slurm": ((), "--ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"),
    "mpi": (("--hosts", "a"), "--host a:4 -np 4"),
    "ray": ((), "4 x "),
    "kubernetes": (
        ("--image", "i", "--volume", "v:/runs", "--run", "/runs/a"),
        'numProcPerNode: 4\n    resourcesPerNode: {"limits": {"nvidia.com/gpu": "4"}}',
    ),
}


@pytest.mark.parametrize("launcher", PLANS)
def test_a_machine_has_a_rank_for_each_of_its_gpus(launcher: str, capsys: Capture) -> None:
    words, wanted = PLANS[launcher]
    plan = shown(capsys, "launch", launcher, "debug", "--gpus", 4, "--dry-run", *words)
    assert wanted in plan


def test_all_launchers_take_gpus() -> None:
    assert PLANS.keys() == LAUNCHERS.keys() - {"agent"}


@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_gpus_that_this_machine_does_not_have_are_refused(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `mpi` the ranks would have trained on the CPU where there was none."""
    pretend(monkeypatch, 1)
    words = ("launch", launcher, "debug", "--gpus", 2)
    check(refused(*words), "launch.too-few-gpus", num_gpus=1, num_wanted=2)


def test_local_starts_a_rank_for_each_gpu_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 4)
    monkeypatch.setattr(elastic, "run_ranks", lambda command, ranks, *_, **__: 70 + ranks)
    assert run("launch", "local", "debug", "--gpus", 2) == 72


# --- output of ranks, printed by the launcher ---


def test_characters_that_stdout_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    Printer(["a"]).line("a", "loss → 1", is_error=False)
    latin.seek(0)
    assert latin.read() == "a | loss ? 1\n"


# --- the first cause when ranks end in different ways ---


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ({0: 130, 1: -9}, (1, -9)),  # the launcher stopped rank 0
        ({0: 1, 1: 75}, (0, 1)),  # ranks save together or not at all
        ({0: -15, 1: 1, 2: 2}, (2, 2)),
        ({0: 130, 1: 130}, (0, 130)),
        ({0: -10, 1: -10}, (0, -10)),  # before the first step
        ({0: 0, 1: 130}, (1, 130)),
        ({0: 0, 1: 3}, (1, 3)),
        ({0: 1, 1: -15, 2: 1}, (0, 1)),
    ],
)
def test_first_cause(ends: dict[int, int], first: tuple[int, int]) -> None:
    assert first_cause(ends) == first


def test_a_rank_that_saves_longer_than_another_has_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal while it saves would end it."""
    monkeypatch.setattr("trainyard.launch.elastic.NOTICE_S", 0.1)
    rank = (
        "import os, sys, time",
        "time.sleep(2 * int(os.environ['RANK']))",
        f"open(f'{tmp_path}/' + os.environ['RANK'], 'w').close()",
        "sys.exit(75)",
    )
    command = (sys.executable, "-c", "; ".join(rank))
    assert run_ranks(command, 2, on_loopback(), Policy(grace_s=60), say=print) == 75
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


# --- signals ---


def test_a_signal_that_another_thread_receives_is_an_event() -> None:
    """The main thread slept on, so that a launcher ran for ever after Ctrl-C."""
    events: queue.SimpleQueue[int] = queue.SimpleQueue()
    is_over = threading.Event()
    reader = threading.Thread(target=is_over.wait)
    reader.start()
    assert reader.ident is not None
    to_reader = (reader.ident, signal.SIGUSR1)
    with handling((signal.SIGUSR1,), lambda number, frame: events.put(number)):
        threading.Timer(0.1, signal.pthread_kill, to_reader).start()
        try:
            assert next_event(events) == signal.SIGUSR1
        finally:
            is_over.set()
            reader.join()


def test_the_wait_ends() -> None:
    with pytest.raises(queue.Empty):
        next_event(queue.SimpleQueue[int](), 0.01)
