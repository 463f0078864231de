"""A copy of the zygote finds what a real start finds, and ends in the same ways."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import zygote
from tests.test_cli_signals import wait_for

pytestmark = pytest.mark.night

ROOT = Path(__file__).parents[2]
FACTS = ("-m", "tests.zygote.facts")


@pytest.fixture(scope="module")
def copied() -> Iterator[str]:
    """The program that stands in for Python."""
    end = None if zygote.PROGRAM in os.environ else zygote.start()
    program = Path(os.environ[zygote.PROGRAM])
    try:
        wait_for(program.with_name("socket").exists, "the zygote", 120)
        yield str(program)
    finally:
        if end:
            end()


@pytest.fixture
def real() -> str:
    return str(Path(sys.prefix) / "bin" / "python")


def run(program: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*options.pop("before", ()), program, *words]
    changes = {
        os.fsencode(name): os.fsencode(text) for name, text in options.pop("changes", {}).items()
    }
    options["env"] = os.environb | changes
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options
    )


def with_environment(**changes: str) -> dict[str, Any]:
    return {"changes": changes}


def ignoring(number: int) -> Callable[[], object]:
    return lambda: signal.signal(number, signal.SIG_IGN)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "threads": with_environment(OMP_NUM_THREADS="1"),
    "devices": with_environment(CUDA_VISIBLE_DEVICES="3"),
    "own": with_environment(TRAINYARD_ANY="a b\nc", COLUMNS="40"),
    "bytes": with_environment(TRAINYARD_ANY="\udcff"),
    "zone": with_environment(TZ="Asia/Tokyo"),
    "safe path": with_environment(PYTHONSAFEPATH="1", PYTHONPATH=str(ROOT)),
    "unbuffered": with_environment(PYTHONUNBUFFERED="1"),
    "buffered": with_environment(PYTHONUNBUFFERED=""),
    "path": with_environment(PYTHONPATH="/tmp"),
    "locale": with_environment(LC_ALL="C"),
    "libraries": with_environment(LD_LIBRARY_PATH="/tmp"),
    "one core": {"before": ("taskset", "-c", "0")},
    "nice": {"before": ("nice", "-n", "3")},
    "files": {"before": ("prlimit", "--nofile=200:4096")},
    "umask": {"umask": 0o77},
    "interrupt": {"preexec_fn": ignoring(signal.SIGINT)},
    "hang-up": {"preexec_fn": ignoring(signal.SIGHUP)},
    "blocked": {"preexec_fn": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])},
    "no input": {"preexec_fn": lambda: os.close(0)},
    "session": {"start_new_session": True},
}
BY_REAL_STARTS = {"safe path", "path", "locale", "libraries", "files", "no input"}


@pytest.mark.parametrize("case", CASES)
def test_a_copy_finds_what_a_real_start_finds(case: str, real: str, copied: str) -> None:
    found = []
    for program in (real, copied):
        done = run(program, *FACTS, "a", "b c", **CASES[case])
        assert (done.returncode, done.stderr) == (0, "")
        found.append(json.loads(done.stdout))
    assert found[1].pop("is_copy") == (case not in BY_REAL_STARTS)
    assert not found[0].pop("is_copy")
    assert found[0] == found[1]


def test_descriptors_are_handed_on(copied: str) -> None:
    read, write = os.pipe()
    with open(read) as file:
        done = run(copied, *FACTS, pass_fds=(write,))
        os.close(write)
        assert file.read() == ""  # the copy has closed it
    assert write in json.loads(done.stdout)["descriptors"]


def test_a_folder_that_is_gone(tmp_path: Path, real: str, copied: str) -> None:
    words = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.argv[1], sys.argv[1:])"
    ends = []
    for program in (real, copied):
        folder = tmp_path / "gone"
        folder.mkdir()
        command = [real, "-c", words, program, "-m", "trainyard", "recipes", "digits"]
        ends.append(subprocess.run(command, cwd=folder, capture_output=True, check=False))
    assert ends[0].returncode == ends[1].returncode
    assert (ends[0].stdout, ends[0].stderr) == (ends[1].stdout, ends[1].stderr)


@pytest.mark.parametrize(
    "ending",
    [
        *(("exit", "0"), ("exit", "2"), ("exit", "300"), ("exit", "why"), ("fail",)),
        *(("kill", "2"), ("kill", "6"), ("kill", "9"), ("kill", "15")),
    ],
)
def test_a_client_ends_as_the_copy_ends(ending: tuple[str, ...], real: str, copied: str) -> None:
    first, second = (run(program, *FACTS, *ending) for program in (real, copied))
    assert (first.returncode, first.stderr) == (second.returncode, second.stderr)


@pytest.mark.parametrize("number", [1, 2, 3, 10, 12, 14, 15, 24])
def test_signals_reach_the_copy(number: int, copied: str) -> None:
    with waiting(copied, number) as (client, _):
        client.send_signal(number)
        assert client.wait(20) == 7


def test_a_copy_is_killed_with_its_client(copied: str) -> None:
    with waiting(copied, signal.SIGTERM) as (client, process):
        client.kill()
        wait_for(lambda: not Path(f"/proc/{process}").exists(), "its end")


def test_a_copy_is_told_of_the_death_of_its_parent(copied: str, real: str) -> None:
    words = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [real, "-c", words, copied, *FACTS, "wait", "10"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        process = started(parent)
        parent.kill()
        wait_for(lambda: not Path(f"/proc/{process}").exists(), "its end")


@contextmanager
def waiting(program: str, number: int) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A client whose copy waits for a signal, and the copy's pid."""
    command = [program, *FACTS, "wait", str(number)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as client:
        try:
            yield client, started(client)
        finally:
            client.kill()


def started(process: "subprocess.Popen[str]") -> int:
    assert process.stdout
    process.stdout.readline()
    return int(process.stdout.readline().split()[1])


def test_two_copies_draw_other_random_numbers(copied: str) -> None:
    """Python and NumPy seed their generators at import, once for all copies."""
    lines = [run(copied, *FACTS, "draw").stdout.splitlines()[1] for _ in range(2)]
    ours, theirs = (line.split() for line in lines)
    assert not set(ours) & set(theirs)
