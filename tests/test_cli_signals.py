"""Signals end a run after a checkpoint, and nothing is left of it."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from tests.command_line import Capture, newest, run
from tests.tiers import tiered
from tests.web import free_port
from trainyard.training.checkpoint import find_problem

pytestmark = pytest.mark.slow

ENDINGS = [(signal.SIGINT, 130), (signal.SIGHUP, 130), (signal.SIGXCPU, 75)]
LONG = (  # a run that reports at once and would never end
    *("--run.length", "1000000 steps", "--run.log_every", "1 steps"),
    *("--run.eval_every", "0 steps", "--run.save_every", "1 second", "--data.threads", "1"),
)


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def has_begun(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and '"kind": "train"' in metrics.read_text()


def has_saved(folder: Path) -> bool:
    return (folder / "checkpoints" / "latest").exists()


def check_stopped_run(folder: Path) -> None:
    """The newest checkpoint is whole and that of the last step that was reported."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    progress = json.loads((newest(folder) / "progress.json").read_text())
    assert progress["step"] == json.loads(lines[-1])["step"] > 0
    assert find_problem(newest(folder)) is None


@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_train_stops_after_a_checkpoint(
    number: signal.Signals, code: int, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "run"

    def stop() -> None:
        wait_for(lambda: has_begun(folder), "the first report")
        os.kill(os.getpid(), number)

    threading.Thread(target=stop).start()
    before = signal.getsignal(number)
    assert run("train", "debug", "--data", digits, "--run", folder, *LONG) == code
    said = capsys.readouterr()
    assert said.err == ""
    assert signal.getsignal(number) == before
    check_stopped_run(folder)


@dataclasses.dataclass
class Started:
    """A command with all processes that come of it, told by a variable in their environment."""

    process: subprocess.Popen[str]
    token: str

    def members(self) -> list[int]:
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if self.token.encode() in _content(path)
        ]

    def kill(self, number: int) -> None:
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def shared_memory(self) -> set[str]:
        """Names in /dev/shm that any of the processes has mapped."""
        maps = [_content(Path(f"/proc/{pid}/maps")).decode() for pid in self.members()]
        words = {word for text in maps for word in text.split()}
        return {word for word in words if word.startswith("/dev/shm/")}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def started(tmp_path: Path, *arguments: object) -> AbstractContextManager[Started]:
    """A command under way; nothing of it is left when a test fails either."""
    return under_way(str(tmp_path), [sys.executable, "-m", "trainyard", *map(str, arguments)])


@contextmanager
def under_way(
    value: str,
    words: list[str],
    variables: Mapping[str, str] | None = None,
    *,
    stderr: int = subprocess.PIPE,
    cwd: Path | None = None,
) -> Iterator[Started]:
    """Any command, whose processes are told from others by a value; nothing of it is left."""
    variable = "TRAINYARD_TEST"
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | (variables or {}) | {variable: value, "PYTHONFAULTHANDLER": "1"},
        start_new_session=True,
        cwd=cwd,
    ) as process:
        command = Started(process, f"{variable}={value}\0")
        try:
            yield command
        except BaseException:
            command.kill(signal.SIGABRT)  # it writes the stacks of all threads
            with suppress(subprocess.TimeoutExpired):
                print(*process.communicate(timeout=10))
            raise
        finally:
            command.kill(signal.SIGKILL)


def check_ending(
    command: Started, number: signal.Signals, folder: Path, num_processes: int
) -> tuple[int, str, str]:
    """Signal a command once it trains: exit code and output, and that nothing is left of it."""
    wait_for(lambda: has_begun(folder), "the first report")
    assert len(command.members()) == num_processes
    named = command.shared_memory()
    command.process.send_signal(number)
    out, err = command.process.communicate(timeout=60)
    wait_for(lambda: not command.members(), "the last process to end", timeout_s=10)
    assert not [name for name in named if os.path.exists(name)]
    return command.process.returncode, out, err


def test_nothing_is_left_of_train(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(tmp_path, "train", "debug", "--data", digits, "--run", folder, *LONG) as command:
        code, out, err = check_ending(command, signal.SIGTERM, folder, num_processes=2)
    assert (code, err) == (130, "")
    assert out
    check_stopped_run(folder)


def test_launch_stops_after_a_checkpoint(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    where = ("--data", digits, "--run", folder, "--ranks", "2")
    with started(tmp_path, "launch", "local", "debug", *where, *LONG) as command:
        code, out, err = check_ending(command, signal.SIGUSR1, folder, num_processes=5)
    assert (code, err) == (75, "")
    assert out
    check_stopped_run(folder)


@pytest.mark.night
def test_launch_says_what_is_wrong_once(digits: Path, tmp_path: Path) -> None:
    where = ("--data", digits, "--run", tmp_path / "run", "--ranks", "2")
    with started(tmp_path, "launch", "local", "debug", *where, "--batch.size", "1") as command:
        out, err = command.process.communicate(timeout=60)
        assert command.members() == []
    assert command.process.returncode == 2
    assert "batch.size = 1 " in err
    assert err.count("\n") == 1
    assert out == ""


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_ctrl_c_ends_a_rank_that_waits_for_an_absent_one(
    command: str, digits: Path, finished: Path, tmp_path: Path
) -> None:
    port = free_port()
    what = ["debug", "--run", tmp_path] if command == "train" else [finished]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-m", "trainyard", command, *map(str, what), "--data", str(digits)],
        env=os.environ | place,
    )
    try:
        wait_for(lambda: is_listening(port), "the rendezvous")
        time.sleep(0.2)  # from listening to waiting
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT
    finally:
        process.kill()


@pytest.mark.parametrize("has_new_run", tiered([True, False], night=[False]))
def test_a_run_whose_directory_was_renamed_writes_nothing_more(
    has_new_run: bool, digits: Path, tmp_path: Path
) -> None:
    """It added its steps and checkpoints to those of the new run, or ended with a traceback."""
    folder, renamed = tmp_path / "run", tmp_path / "renamed"
    with started(tmp_path, "train", "debug", "--data", digits, "--run", folder, *LONG) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint")
        command.process.send_signal(signal.SIGSTOP)
        folder.rename(renamed)
        if has_new_run:
            words = ("--run.length", "2 steps", "--run.seed", "7")
            assert run("train", "debug", "--data", digits, "--run", folder, *words) == 0
        before = sorted(tmp_path.glob("run/**/*"))
        command.process.send_signal(signal.SIGCONT)
        _, err = command.process.communicate(timeout=60)
        assert (command.process.returncode, err.count("\n")) == (2, 1), err
        assert str(folder) in err
    assert sorted(tmp_path.glob("run/**/*")) == before
    assert has_saved(renamed)
