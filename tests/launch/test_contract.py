"""Every launcher gives its ranks, stubs here, their environment, restarts and signals."""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from tests.test_cli_signals import wait_for
from tests.web import free_port
from trainyard.distributed.launcher_variables import discover
from trainyard.errors import STOPS
from trainyard.launch import elastic
from trainyard.launch.elastic import Policy, in_pod, on_loopback, run_ranks
from trainyard.launch.exit_codes import LEFT
from trainyard.launch.job import Job
from trainyard.launch.mpi import MpiOptions, launch_mpi

STUB = Path(__file__).parent / "stub.py"
LAUNCHERS = ("local", "pod", "mpi")
NEEDS_MPIRUN = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs OpenMPI")


class Stubs:
    """Ranks that follow their courses, under a launcher."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{STUB}" "$@"\n')
        self.python.chmod(0o755)
        self.said: list[str] = []

    def launch(self, launcher: str, *courses: Sequence[str], **policy: Any) -> int:
        for rank, words in enumerate(courses):
            (self.folder / f"course-{rank}").write_text("\n".join(words))
        job = Job(("train", "debug"), self.folder, python=str(self.python))
        if launcher == "mpi":
            is_root = os.geteuid() == 0
            options = MpiOptions(hosts={"localhost": len(courses)}, is_root=is_root)
            return launch_mpi(job, options)
        where = on_loopback() if launcher == "local" else self.pod(len(courses))
        num_ranks = len(courses)
        return run_ranks(job.command, num_ranks, where, Policy(**policy), say=self.said.append)

    def pod(self, num_ranks: int) -> elastic.KnownMeetingPoint:
        names = ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_PORT")
        values = (1, num_ranks, 0, free_port())
        env = {f"PET_{name}": str(value) for name, value in zip(names, values, strict=True)}
        return in_pod(env | {"PET_MASTER_ADDR": "127.0.0.1"})[1]

    def noted(self, name: str, rank: int) -> list[Any]:
        path = self.folder / f"{name}-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def signal_once_begun(self, number: int, num_ranks: int) -> threading.Thread:
        def send() -> None:
            wait_for(lambda: all(self.noted("start", r) for r in range(num_ranks)), "the ranks")
            os.kill(os.getpid(), number)

        thread = threading.Thread(target=send)
        thread.start()
        return thread


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    monkeypatch.setenv("STUB", str(tmp_path))
    monkeypatch.setenv("OMPI_MCA_odls_base_sigkill_timeout", "1")
    monkeypatch.setattr(elastic, "NOTICE_S", 0.1)
    return Stubs(tmp_path)


def every(*launchers: str) -> list[Any]:
    marks = {"mpi": [NEEDS_MPIRUN, pytest.mark.slow]}
    return [pytest.param(name, marks=marks.get(name, [])) for name in launchers]


@pytest.mark.parametrize("launcher", every(*LAUNCHERS))
def test_ranks_know_who_they_are_and_where_they_meet(launcher: str, stubs: Stubs) -> None:
    assert stubs.launch(launcher, ["0"], ["0"]) == 0
    environments: list[Mapping[str, str]] = [stubs.noted("start", rank)[0] for rank in range(2)]
    worlds = [discover(environment) for environment in environments]
    found = [(world.rank, world.size, world.local_rank, world.local_size) for world in worlds]
    assert found == [(0, 2, 0, 2), (1, 2, 1, 2)]
    meeting = {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments}
    assert len(meeting) == 1


@pytest.mark.parametrize("launcher", every(*LAUNCHERS))
@pytest.mark.parametrize("code", [2, 3, 75])
def test_what_would_recur_or_was_asked_for_is_not_started_again(
    code: int, launcher: str, stubs: Stubs
) -> None:
    """A mistake, divergence, and a stop after which the scheduler starts the run again."""
    other = ["save"] if code != 75 else ["75"]
    assert stubs.launch(launcher, other, [str(code)], restarts=3) == code
    assert len(stubs.noted("start", 1)) == 1


@pytest.mark.parametrize("launcher", every("local", "pod"))
@pytest.mark.parametrize("end", ["1", "-9"])
def test_a_failure_is_followed_by_a_start_of_all_ranks(
    end: str, launcher: str, stubs: Stubs
) -> None:
    assert stubs.launch(launcher, ["save", "0"], [end, "0"], restarts=1) == 0
    assert [len(stubs.noted("start", rank)) for rank in range(2)] == [2, 2]
    assert stubs.noted("signal", 0) == [signal.SIGTERM]
    assert len(stubs.said) == 1


@pytest.mark.parametrize("launcher", every("local", "pod"))
def test_restarts_are_counted(launcher: str, stubs: Stubs) -> None:
    assert stubs.launch(launcher, ["save"], ["1"], restarts=2) == 1
    assert len(stubs.noted("start", 1)) == 3
    assert len(stubs.said) == 2


def test_a_rank_that_is_killed_is_named(stubs: Stubs) -> None:
    with raises("launch.rank-killed", rank=1, signal=9) as caught:
        stubs.launch("local", ["save"], ["-9"])
    assert caught.value.exit_code == 137


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("launcher", every("local", "mpi"))
def test_a_signal_reaches_the_ranks_which_save(
    launcher: str, number: signal.Signals, stubs: Stubs
) -> None:
    sent = stubs.signal_once_begun(number, num_ranks=2)
    code = stubs.launch(launcher, ["save"], ["save"], restarts=3)
    sent.join()
    assert code == STOPS[number].exit_code
    for rank in range(2):
        assert len(stubs.noted("start", rank)) == len(stubs.noted("signal", rank)) == 1


def test_a_pod_that_is_told_to_end_leaves_the_others(stubs: Stubs) -> None:
    """Its ranks end as for a requeue, after which those of other pods start again."""
    sent = stubs.signal_once_begun(signal.SIGTERM, num_ranks=2)
    assert stubs.launch("pod", ["save"], ["save"], others_go_on=True) == LEFT
    sent.join()
    assert stubs.noted("signal", 0) == [signal.SIGUSR1]


def test_a_stop_that_could_not_save_is_no_stop(stubs: Stubs) -> None:
    """The exit code was 130, which says that all is saved, whatever became of the ranks."""
    sent = stubs.signal_once_begun(signal.SIGTERM, num_ranks=2)
    with raises("launch.not-saved") as caught:
        stubs.launch("local", ["deaf"], ["save"], grace_s=0.5)
    sent.join()
    assert caught.value.exit_code == 137
