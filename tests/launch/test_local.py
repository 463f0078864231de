"""`launch local`: what becomes of a run when a rank, or the launcher, is killed."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.command_line import newest
from tests.test_cli_signals import (
    LONG,
    Started,
    check_ending,
    check_stopped_run,
    has_begun,
    has_saved,
    started,
    wait_for,
)
from trainyard.launch.elastic import Policy, on_loopback, run_ranks
from trainyard.launch.job import Job
from trainyard.training.checkpoint import find_problem

pytestmark = pytest.mark.slow


def process_of(command: Started, rank: int) -> int:
    for process in command.members():
        folder = Path(f"/proc/{process}")
        is_rank = f"\0RANK={rank}\0".encode() in folder.joinpath("environ").read_bytes()
        if is_rank and b"trainyard.data.loader" not in folder.joinpath("cmdline").read_bytes():
            return process
    raise AssertionError(f"no rank {rank}")


def check_reports(folder: Path, num_steps: int) -> None:
    """Each step has a line, in a run of one loss; those since its checkpoint have two."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps[-1] == num_steps
    assert set(steps) == set(range(1, num_steps + 1))


@pytest.mark.night
def test_a_run_goes_on_after_a_rank_was_killed(digits: Path, tmp_path: Path) -> None:
    folder, num_steps = tmp_path / "run", 60
    words = ["--data", digits, "--run", folder, "--ranks", 4, "--restarts", 1, "--data.threads", 1]
    words += ["--average.name", "gossip", "--batch.size", 8, "--run.length", f"{num_steps} steps"]
    words += ["--run.log_every", "1 step", "--run.save_every", "2 steps", "--model.ema_decay", 0.9]
    with started(tmp_path, "launch", "local", "debug", *words) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint")
        os.kill(process_of(command, 0), signal.SIGKILL)
        out, err = command.process.communicate(timeout=100)
        assert command.members() == []
    assert command.process.returncode == 0
    (saved,) = map(int, re.findall(r"the same command resumes from step-(\d+)", err))
    assert err.count("rank 0 (") == err.count("starting again (1 of 1)") == 1
    assert err.count("\n") == 2
    assert f"at step {saved} with 4 replicas" in out.replace("\n", " ")
    check_reports(folder, num_steps)
    assert newest(folder).name == f"step-{num_steps:08d}"
    assert find_problem(newest(folder)) is None


def test_ranks_end_with_their_launcher(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--data", digits, "--run", folder, "--ranks", "2", *LONG)
    with started(tmp_path, "launch", "local", "debug", *words) as command:
        wait_for(lambda: has_begun(folder), "the first report")
        command.process.kill()
        wait_for(lambda: not command.members(), "the ranks to end")
    check_stopped_run(folder)


def test_signals_are_taken_as_before_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a folder of torch's agent left over, which there was after each run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    signals = [signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")]
    before = [signal.getsignal(each) for each in signals]
    for words, code in ((("recipes",), 0), (("nothing",), 2)):
        assert (
            run_ranks(Job(words, tmp_path).command, 1, on_loopback(), Policy(), say=print) == code
        )
        assert [signal.getsignal(each) for each in signals] == before
    assert list(tmp_path.iterdir()) == []


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.night
def test_ctrl_z_stops_the_ranks_too(digits: Path, tmp_path: Path) -> None:
    """They trained on while it stood still. The pause is longer than a hang may be."""
    folder = tmp_path / "run"
    words = ("--data", digits, "--run", folder, "--ranks", "2", *LONG, "--run.hang_timeout", "5")
    with started(tmp_path, "launch", "local", "debug", *words) as command:
        wait_for(lambda: has_begun(folder), "the first report")
        processes = [command.process.pid, process_of(command, 0), process_of(command, 1)]
        command.process.send_signal(signal.SIGTSTP)
        wait_for(lambda: {*map(state_of, processes)} == {"T"}, "all to stop", timeout_s=10)
        before = (folder / "metrics.jsonl").stat().st_size
        time.sleep(25)
        assert (folder / "metrics.jsonl").stat().st_size == before
        command.process.send_signal(signal.SIGCONT)
        wait_for(lambda: (folder / "metrics.jsonl").stat().st_size > 2 * before, "steps")
        code, _, err = check_ending(command, signal.SIGTERM, folder, num_processes=5)
    assert (code, err) == (130, "")
    check_stopped_run(folder)


@pytest.mark.night
def test_ranks_of_a_stopped_launcher_end_with_it(digits: Path, tmp_path: Path) -> None:
    """They stayed stopped for ever, with their memory and the lock of the run."""
    folder = tmp_path / "run"
    words = ("--data", digits, "--run", folder, "--ranks", "2", *LONG)
    with started(tmp_path, "launch", "local", "debug", *words) as command:
        wait_for(lambda: has_begun(folder), "the first report")
        processes = [command.process.pid, process_of(command, 0), process_of(command, 1)]
        command.process.send_signal(signal.SIGTSTP)
        wait_for(lambda: {*map(state_of, processes)} == {"T"}, "all to stop", timeout_s=10)
        command.process.kill()
        wait_for(lambda: not command.members(), "the ranks to end", timeout_s=20)
    check_stopped_run(folder)
