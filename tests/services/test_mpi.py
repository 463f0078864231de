"""`launch mpi` with a real OpenMPI."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.command_line import newest
from tests.services.losses import SAME, Losses, has_gone_on, losses_of, reports
from tests.test_cli_signals import LONG, Started, check_stopped_run, has_begun, started, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("mpirun") is None,
        reason="needs OpenMPI: tests/services/install.sh, or apt-get install openmpi-bin",
    ),
]
PATIENCE_S = 150


WAIT = "OMPI_MCA_odls_base_sigkill_timeout"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAIT, "1")


def rank_of(command: Started, rank: int) -> int:
    for process in command.members():
        folder = Path(f"/proc/{process}")
        is_rank = f"\0OMPI_COMM_WORLD_RANK={rank}\0".encode() in (folder / "environ").read_bytes()
        if is_rank and b"trainyard.data.loader" not in (folder / "cmdline").read_bytes():
            return process
    raise AssertionError(f"no rank {rank}")


def test_same_losses_as_without_mpi(digits: Path, tmp_path: Path, local_losses: Losses) -> None:
    folder = tmp_path / "run"
    words = ("--ranks", 2, "--data", digits, "--run", folder, *SAME)
    with started(tmp_path, "launch", "mpi", "debug", *words) as command:
        _, err = command.process.communicate(timeout=PATIENCE_S)
        assert command.members() == []
    assert (command.process.returncode, err) == (0, "")
    assert losses_of(folder) == local_losses


@pytest.mark.night
def test_a_night_with_mpi(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeued; then a rank is killed; the same command goes on; then Ctrl-C."""
    folder = tmp_path / "run"
    words = ("--ranks", 2, "--data", digits, "--run", folder, *LONG)

    with started(tmp_path, "launch", "mpi", "debug", *words) as command:
        wait_for(lambda: has_begun(folder), "the first report", PATIENCE_S)
        command.process.send_signal(signal.SIGUSR1)
        command.process.communicate(timeout=PATIENCE_S)
        assert (command.process.returncode, command.members()) == (75, [])
    check_stopped_run(folder)

    monkeypatch.setenv(WAIT, "3")  # s, for a rank to notice that another was killed, and to save
    with started(tmp_path, "launch", "mpi", "debug", *words) as command:
        wait_for(lambda: has_gone_on(folder), "the run to go on", PATIENCE_S)
        before = newest(folder)
        wait_for(lambda: newest(folder) != before, "a checkpoint", PATIENCE_S)
        os.kill(rank_of(command, 1), signal.SIGKILL)
        _, err = command.process.communicate(timeout=PATIENCE_S)
        assert (command.process.returncode, command.members()) == (137, [])
    with started(tmp_path, "launch", "mpi", "debug", *words) as command:
        wait_for(lambda: has_gone_on(folder, times=2), "the run to go on again", PATIENCE_S)
        command.process.send_signal(signal.SIGINT)
        command.process.communicate(timeout=PATIENCE_S)
        assert (command.process.returncode, command.members()) == (130, [])
    saved = re.findall(r"rank 1 .*the same command resumes from step-(\d+)", err)
    resumed = [line["step"] for line in reports(folder) if line.get("event") == "resumed"]
    assert int(saved[0]) == resumed[1] > resumed[0]
    check_stopped_run(folder)


@pytest.mark.night
def test_nothing_is_left_when_the_launcher_is_killed(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--ranks", 2, "--data", digits, "--run", folder, *LONG)
    with started(tmp_path, "launch", "mpi", "debug", *words) as command:
        wait_for(lambda: has_begun(folder), "the first report", PATIENCE_S)
        command.process.kill()
        wait_for(lambda: not command.members(), "mpirun and the ranks to end", PATIENCE_S)
    check_stopped_run(folder)
