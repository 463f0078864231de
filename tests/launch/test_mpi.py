"""The command line that `launch mpi` gives to mpirun."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
from trainyard.launch import mpi
from trainyard.launch.job import Job
from trainyard.launch.mpi import MpiOptions, _passing_signals, command_line, launch_mpi, variables

JOB = Job(("train", "debug", "--run", "runs/debug"), Path("runs/debug"), python="/venv/bin/python")
HERE = """
    mpirun --host localhost:2 -np 2 --bind-to none
    -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29501
    /venv/bin/python -P -m trainyard train debug --run runs/debug
"""
HOSTS = """
    /opt/openmpi/bin/mpirun --allow-run-as-root --host a:4,b:2 -np 6 --bind-to none
    -x MASTER_ADDR=a -x MASTER_PORT=29501 -x NCCL_DEBUG --mca btl_tcp_if_include eth0
    /venv/bin/python -P -m trainyard train debug --run runs/debug
"""


def test_ranks_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "free_port", lambda: 29501)
    options = MpiOptions(hosts={"localhost": 2})
    assert command_line(JOB, options) == HERE.split()
    assert variables(options) == {
        "OMPI_MCA_odls_base_sigkill_timeout": "5",
        "OMPI_MCA_oob_tcp_if_include": "lo",
    }


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port below the ephemeral ones: what is free on this machine may be taken on another."""
    monkeypatch.delattr(mpi, "free_port")
    monkeypatch.setattr(mpi, "PORTS", range(29501, 29502))


@pytest.mark.usefixtures("port")
def test_ranks_on_another_host() -> None:
    command = command_line(JOB, MpiOptions(hosts={"a": 2}))
    assert {"MASTER_ADDR=127.0.0.1", "MASTER_PORT=29501"} <= set(command)


@pytest.mark.usefixtures("port")
def test_ranks_on_several_hosts() -> None:
    options = MpiOptions(
        hosts={"a": 4, "b": 2},
        mpirun="/opt/openmpi/bin/mpirun",
        extra=("--mca", "btl_tcp_if_include", "eth0"),
        is_root=True,
        passed_on=("NCCL_DEBUG",),
    )
    assert command_line(JOB, options) == HOSTS.split()
    assert variables(options) == {"OMPI_MCA_odls_base_sigkill_timeout": "5"}


def test_dry_run(tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (tmp_path / "hosts").write_text("a slots=3\nb  # with as many ranks as --ranks has it\n")
    words = ("--hosts", tmp_path / "hosts", "--ranks", 2, "--mpirun", "my mpirun", "--dry-run")
    assert run("launch", "mpi", "debug", *words) == 0
    printed = shlex.split(capfd.readouterr().out)
    assert printed[:3] == ["env", "OMPI_MCA_odls_base_sigkill_timeout=5", "my mpirun"]
    assert printed[printed.index("--host") + 1 :][:3] == ["a:3,b:2", "-np", "5"]
    assert "NCCL_DEBUG" in printed and "MASTER_ADDR=a" in printed


def test_hosts(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    words = ("launch", "mpi", "debug", "--data", "/only/there", "--dry-run", "--hosts")
    check(refused(*words, "a:8,b"), "launch.no-ranks-per-host")
    check(refused(*words, "me@a:8"), "launch.user-for-mpirun", value="me@a")
    assert "-x NCCL_DEBUG" in shown(capsys, *words, "a:8")


@pytest.mark.slow
def test_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with subprocess.Popen(["true"]) as process, _passing_signals(process):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_openmpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    check(refused("launch", "mpi", "debug", "--ranks", 2), "launch.needs-mpirun", command="mpirun")


MPIRUN = """\
import os, re, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))
launcher = os.getppid()
while True:
    caught = re.search(r"SigCgt:\\s*(\\w+)", open(f"/proc/{launcher}/status").read())[1]
    if int(caught, 16) >> signal.SIGTERM - 1 & 1:
        break
os.kill(launcher, signal.SIGTERM)
time.sleep(60)
"""


def test_ranks_that_a_signal_ends_before_training_have_stopped(tmp_path: Path) -> None:
    """mpirun reports the signal of a rank as 128 and its number."""
    mpirun = tmp_path / "mpirun"
    words = shlex.join([sys.executable, "-c", MPIRUN])
    mpirun.write_text(f"#!/bin/sh\nexec {words}\n")
    mpirun.chmod(0o755)
    assert launch_mpi(JOB, MpiOptions(hosts={"localhost": 1}, mpirun=str(mpirun))) == 130
