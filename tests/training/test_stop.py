"""Signals become one decision that all ranks share."""

import signal
import time

import pytest

from tests.spawn import spawn
from trainyard import interrupts
from trainyard.errors import Requeued, Stopped
from trainyard.training.stop import StopSignal
from trainyard.world import World

ENDINGS = [
    (signal.SIGINT, Stopped),
    (signal.SIGTERM, Stopped),
    (signal.SIGHUP, Stopped),
    (signal.SIGUSR1, Requeued),
    (signal.SIGUSR2, Requeued),
    (signal.SIGXCPU, Requeued),
]


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)  # to this thread: handled when it returns


@pytest.mark.parametrize(("number", "reason"), ENDINGS)
def test_a_signal_is_noted(number: signal.Signals, reason: type[Stopped]) -> None:
    before = signal.getsignal(number)
    with StopSignal(World()) as stop:
        assert stop.poll() is None
        send(number)
        assert stop.poll() is reason
        assert stop.poll() is reason
    assert signal.getsignal(number) == before


def test_an_interrupt_that_python_dropped_before_stops_a_run_as_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one in a finalizer is: a sweep, which passes a Ctrl-C on once, waited for ever."""
    monkeypatch.setattr(interrupts, "were_raised", False)
    before = signal.signal(signal.SIGINT, interrupts.raise_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    with StopSignal(World()) as stop:
        assert stop.poll() is Stopped


def test_a_handler_that_is_not_pythons_becomes_the_default() -> None:
    """signal.signal() gives None for one in C, which it does not take: a finished run failed."""
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with StopSignal(World()) as stop:
            stop._previous[signal.SIGUSR1] = None
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("numbers", [ENDINGS[2:4], ENDINGS[3:1:-1]], ids=["first", "last"])
def test_to_stop_outweighs_to_requeue(numbers: list[tuple[signal.Signals, object]]) -> None:
    with StopSignal(World()) as stop:
        for number, _ in numbers:
            send(number)
        assert stop.poll() is Stopped


def test_a_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), StopSignal(World()) as stop:
        send(signal.SIGINT)
        assert stop.poll() is Stopped
        later = time.monotonic() + 1.1
        monkeypatch.setattr(time, "monotonic", lambda: later)
        send(signal.SIGTERM)  # a scheduler's last word: the checkpoint is being written
        send(signal.SIGINT)


def test_one_ctrl_c_that_comes_twice_is_one() -> None:
    with StopSignal(World()) as stop:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert stop.poll() is Stopped


def _poll(world: World, number: int, rank: int) -> tuple[list[str], list[int]]:
    """The decisions of four polls, and the counts that they heard of."""
    with StopSignal(world) as stop:
        decisions, heard = [], []
        for step in range(4):
            if step == 1 and world.rank == rank:
                send(signal.Signals(number))
            decisions.append(stop.poll(10 * world.rank + step))
            heard.append(stop.highest)
        return [decision.__name__ if decision else "" for decision in decisions], heard


@pytest.mark.slow
@pytest.mark.parametrize(("number", "reason"), [ENDINGS[1], ENDINGS[2]])
def test_all_ranks_stop_after_the_same_step(number: signal.Signals, reason: type[Stopped]) -> None:
    for decisions, heard in spawn(_poll, 3, int(number), 1):
        assert decisions == ["", "", reason.__name__, reason.__name__]
        assert heard == [-1, 20, 21, 22]


def test_a_hang_up_that_is_ignored_stays_so() -> None:
    """As nohup wants it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal(World()) as stop:
            send(signal.SIGHUP)
            assert stop.poll() is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_timer_for_data_ends_with_the_block() -> None:
    """Its signal came after the handlers were restored, and killed the process."""
    with StopSignal(World(), data_s=0.3) as stop:
        send(signal.SIGTERM)
        with stop.waiting_for_data():
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    time.sleep(0.4)


def test_a_stop_gives_up_data_that_does_not_come() -> None:
    with StopSignal(World(), data_s=0.1) as stop:
        send(signal.SIGUSR1)
        time.sleep(0.3)  # in a step
        with pytest.raises(Requeued), stop.waiting_for_data():
            time.sleep(60)
