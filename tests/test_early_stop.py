"""Signals before the loop end a command with the exit codes that docs/launching.md promises."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.test_cli_signals import Started, is_listening, started, under_way, wait_for
from tests.web import free_port
from trainyard.early_stop import PATIENCE_S, asked, early_stops
from trainyard.errors import PeerError, Requeued, Stopped
from trainyard.training.stop import StopSignal
from trainyard.world import World

CODES = [
    *((signal.SIGUSR1, 75), (signal.SIGUSR2, 75), (signal.SIGXCPU, 75)),
    *((signal.SIGTERM, 130), (signal.SIGHUP, 130)),
]
ENDS_S = 30


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and never answers: an index that takes hours."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(60)
        yield server


def check(command: Started, number: signal.Signals, code: int) -> None:
    command.process.send_signal(number)
    _, err = command.process.communicate(timeout=ENDS_S)
    assert (command.process.returncode, err.count("\n")) == (code, 1), err
    assert f"stopped by {number.name}" in err
    wait_for(lambda: not command.members(), "the last process to end", timeout_s=10)


@pytest.mark.parametrize(("number", "code"), CODES)
def test_while_data_is_indexed(
    number: signal.Signals, code: int, silent: socket.socket, tmp_path: Path
) -> None:
    place = f"http://127.0.0.1:{silent.getsockname()[1]}/data"
    with started(tmp_path, "train", "digits", "--data", place, "--run", tmp_path / "r") as command:
        connection, _ = silent.accept()
        with connection:
            check(command, number, code)
    assert not (tmp_path / "r").exists()


def test_while_torch_waits_for_an_absent_rank(digits: Path, tmp_path: Path) -> None:
    port = free_port()
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, "-m", "trainyard", "train", "digits", "--data", str(digits)]
    with under_way(str(tmp_path), words, place, cwd=tmp_path) as command:
        wait_for(lambda: is_listening(port), "the rendezvous")
        check(command, signal.SIGUSR1, 75)


@pytest.mark.parametrize(("number", "code"), CODES)
def test_while_a_launcher_imports_torch(
    number: signal.Signals, code: int, digits: Path, tmp_path: Path
) -> None:
    words = ("launch", "local", "digits", "--data", digits, "--run", tmp_path / "r")
    with started(tmp_path, *words, "--ranks", "2") as command:
        maps = Path(f"/proc/{command.process.pid}/maps")
        wait_for(lambda: "libtorch" in maps.read_text(), "torch")
        check(command, number, code)


def test_the_main_thread_is_deaf(tmp_path: Path) -> None:
    """In a call that no signal interrupts: the second one for a lock that it has."""
    program = (
        "import ctypes, trainyard.early_stop as e\n"
        "lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        "with e.early_stops():\n"
        "    print('ready', flush=True)\n"
        "    lock(mutex), lock(mutex)\n"
    )
    with under_way(str(tmp_path), [sys.executable, "-c", program]) as command:
        assert command.process.stdout is not None
        assert command.process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # from there into the call
        check(command, signal.SIGUSR2, 75)


def test_a_stop_that_was_swallowed_reaches_the_loop() -> None:
    with early_stops():
        with suppress(Exception):
            os.kill(os.getpid(), signal.SIGUSR1)
        with StopSignal(World()) as stop:
            assert stop.poll() is Requeued


def test_a_stop_that_was_swallowed_is_raised_again() -> None:
    with pytest.raises(Stopped), early_stops():
        with suppress(Exception):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_S)


def test_another_handler_has_it_then() -> None:
    """A launcher's agent, say, which took the signals over after the exception was lost."""
    came: list[int] = []
    with early_stops():
        with suppress(Exception):
            os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
        wait_for(lambda: came, "the signal")
        time.sleep(2.5)  # in which it would come again
    assert came == [signal.SIGTERM]


def test_what_the_loop_has_got_is_not_raised_after_it() -> None:
    with early_stops():
        with StopSignal(World()) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.poll() is Stopped
        time.sleep(2.5)


def test_a_rank_that_ends_after_a_loss_is_deaf_to_its_launcher() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with suppress(PeerError), early_stops(), StopSignal(World()):
            raise PeerError("rank 1 is gone")
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number, _ in CODES]
    with pytest.raises(Stopped), early_stops():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number, _ in CODES] == before
    assert asked() is None


def test_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with early_stops():
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_has_no_part_in_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def body() -> None:
        with early_stops():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_forked_child_has_the_default() -> None:
    with early_stops():
        child = os.fork()
        if child == 0:
            os._exit(int(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
