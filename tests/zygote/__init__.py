"""A process that has imported torch and timm stands in for `python -m trainyard` in tests.

A start then takes a fifth of the CPU time. `sys.executable` is a program that asks that process for
a copy of itself; launchers, hosts and jobs take it from there. What starts otherwise than by
`-m trainyard`, or under conditions that a copy cannot have, starts for real.

It is switched off: `start` is called by its own tests alone, and nothing reads `REAL_STARTS`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

REAL = "TRAINYARD_TESTS_REAL"
"""Variable that has all starts be real ones."""
PROGRAM = "TRAINYARD_TESTS_PYTHON"
"""Variable with the program that stands in for Python."""

REAL_STARTS = (
    *("test_working_directory.py", "test_streams.py", "test_limits.py", "test_few_open_files"),
    "test_nothing_is_left_of_train",
    "test_a_run_goes_on_after_a_rank_was_killed",
    "test_ctrl_z_stops_the_ranks_too",
    "test_nothing_survives_an_early_end",  # looks for children of the client
    "test_a_run_whose_directory_was_renamed",  # stops the client: nobody can pass that on
    "test_a_pod_that_was_moved_goes_on",
    "test_ssh.py::test_losses_are_those_of_local",
    "test_slurm.py::test_same_losses_as_local",
    "test_mpi.py::test_same_losses_as_without_mpi",
)
"""Tests, by parts of their names, that are about the start itself, or that start each launcher."""

ENVIRONMENT = set(os.environ)
"""Names of variables before the imports of tests have set more."""

_PAD = "TRAINYARD_TESTS_PAD"
_HERE = Path(__file__).parent

if PROGRAM in os.environ:  # in a worker, before anything notes what Python is called
    sys.executable = os.environ[PROGRAM]


def start() -> Callable[[], None]:
    """Start the process, and name the program in the environment. What is returned ends it."""
    # Short and without a space, for the first line of a program and for the name of a socket.
    folder = Path(tempfile.mkdtemp(prefix="zygote-", dir="/tmp"))
    for each in Path(sys.executable).parent.iterdir():  # looked for beside Python by some
        (folder / each.name).symlink_to(each)
    program = folder / "python"
    program.unlink(missing_ok=True)
    (folder / "real").symlink_to(sys.executable)
    program.write_text(f"#!{folder}/real -IS\n{(_HERE / 'client.py').read_text()}")
    program.chmod(0o755)
    # The server's /proc has room for the words and variables of those that it forks.
    words = [sys.executable, "-P", str(_HERE / "server.py"), str(folder), str(os.getpid())]
    words.append(" " * 60_000)
    environment = os.environ | {_PAD: " " * 120_000}
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL)
    os.environ[PROGRAM] = str(program)

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder)
        del os.environ[PROGRAM]

    return end
