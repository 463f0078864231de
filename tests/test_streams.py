"""Output that nobody reads, and standard streams that are closed, do a command no harm."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import SHORT
from tests.test_cli_signals import LONG, check_stopped_run, has_begun, has_saved, wait_for
from tests.tiers import tiered
from trainyard import command_line

COMMAND = f"{shlex.quote(sys.executable)} -P -m trainyard"
COMMANDS = ["train", "launch local --ranks 2"]
EACH_STEP = ("--run.log_every", "1 steps", "--data.threads", "1")


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, text=True, capture_output=True, timeout=100, check=False
    )


def in_shell(name: str, digits: Path, *options: object) -> str:
    words = ("debug", "--data", digits, "--run", "run", *options)
    return f"{COMMAND} {name} {shlex.join(map(str, words))}"


def steps(folder: Path) -> list[int]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(COMMANDS, night=COMMANDS[1:]))
def test_a_run_outlives_the_readers_of_its_output(name: str, digits: Path, tmp_path: Path) -> None:
    """It ended at the first line that it could not print: 1, no message, no checkpoint."""
    words = in_shell(name, digits, *EACH_STEP, "--run.length", "8 steps", "--all-ranks")
    ended = shell(f"{words} 2> >(true) | head -1; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert steps(tmp_path) == [*range(1, 9)]
    assert has_saved(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(COMMANDS, night=COMMANDS[1:]))
def test_closed_streams(name: str, digits: Path, tmp_path: Path) -> None:
    """Nor does a file get the number of one, such as metrics.jsonl that of stderr."""
    ended = shell(f"{in_shell(name, digits, *SHORT)} <&- >&- 2>&-", tmp_path)
    assert ended.returncode == 0
    assert steps(tmp_path) == [1, 2]
    assert has_saved(tmp_path / "run")


@pytest.mark.slow
def test_a_character_that_the_locale_lacks_ends_no_run(digits: Path, tmp_path: Path) -> None:
    """It ended with a traceback at the "…" of its first lines, where the locale is C or Latin-1."""
    words = in_shell("train", digits, *SHORT)
    ended = shell(f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {words}", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "classes   10: 0, 1, 2, \\u2026 9" in ended.stdout


@pytest.mark.slow
def test_a_run_outlives_its_terminal(digits: Path, tmp_path: Path) -> None:
    """A terminal that has hung up is no error of a pipe, and the live lines stop too."""
    ours, theirs = pty.openpty()
    words = in_shell("train", digits, *EACH_STEP, "--run.length", "30 steps")
    with subprocess.Popen(["bash", "-c", words], cwd=tmp_path, stdout=theirs, stderr=theirs) as run:
        os.close(theirs)
        wait_for(lambda: has_begun(tmp_path / "run"), "the first report")
        os.close(ours)
        assert run.wait(timeout=60) == 0
    assert steps(tmp_path)[-1] == 30


@pytest.mark.slow
def test_ctrl_c_into_a_pipe_whose_reader_ends_first(digits: Path, tmp_path: Path) -> None:
    """The result could not be printed: the exit code was 0, though the run was stopped."""
    words = in_shell("train", digits, *LONG)
    script = f"trap : INT; {words} | cat; exit ${{PIPESTATUS[0]}}"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL
    ) as run:
        wait_for(lambda: has_begun(tmp_path / "run"), "the first report")
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(timeout=60) == 130
    check_stopped_run(tmp_path / "run")


def test_a_full_disk_under_stdout_fails_a_command_whose_output_is_its_result() -> None:
    ended = shell(f"{COMMAND} recipes debug >/dev/full", Path())
    said = "trainyard: stdout: No space left on device: it is incomplete\n"
    assert (ended.returncode, ended.stderr) == (1, said)


@pytest.mark.parametrize(("is_run", "code"), [(True, 0), (False, 1)])
def test_a_run_has_its_results_in_its_directory(
    is_run: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "lost_output", lambda: OSError(28, "No space left"))
    assert command_line._code_with_output(0, is_run=is_run) == code
    assert command_line._code_with_output(130, is_run=is_run) == 130


def test_a_terminal_that_another_program_has_made_non_blocking() -> None:
    """A write is refused then while the terminal is busy, and Python raises BlockingIOError."""
    program = (
        "import os; from trainyard.streams import protect_streams\n"
        "protect_streams(); os.set_blocking(1, False); print('x' * 1_000_000)"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        time.sleep(0.3)  # in which the pipe fills up
        out, err = command.communicate(timeout=60)
    assert (len(out), err) == (1_000_001, b"")
