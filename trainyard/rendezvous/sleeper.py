"""Ends the process of a training thread that does not hear of an alarm."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from trainyard.rendezvous.pulse import Pulse

_WAKE_S = 30  # for it to come back
_STUCK_S = 3  # in which a thread does nothing at all, though all connections are cut
_IDLE_S = 0.01  # processor time of a thread that does nothing
_HEAR_S = 1  # for the others to read the last words of a process


class Sleeper:
    """A thread that waits for others whom it cannot hear any more, and may not come back.

    Nor does its GPU, for which it may busily wait; and of a message that was cut short gloo tells
    neither who receives nor who sends the rest (`Pair::signalException`, transport/tcp).
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._is_awake = threading.Event()
        self.before_end: Callable[[], None] = lambda: None
        """Finishes work that must not be lost with the process; it has a limit of its own."""
        self.uses_gpu = False

    def wake(self) -> None:
        """It has heard."""
        self._is_awake.set()

    def wait(self, reason: str, *, speaks: bool) -> None:
        """Until it has heard; or end this process, which `speaks` of the reason then, or not."""
        begun = since = time.monotonic()
        busy_s = self._pulse.busy_s()
        while not self._is_awake.wait(timeout=1):
            now, seen = time.monotonic(), self._pulse.look()
            if self._pulse.busy_s() > busy_s + _IDLE_S or not seen.waits:
                busy_s, since = self._pulse.busy_s(), now
            is_stuck = now > since + _STUCK_S and not self.uses_gpu
            if is_stuck or (now > begun + _WAKE_S and (seen.waits or seen.is_overdue)):
                self.before_end()
                end_process(reason if speaks else "")


def end_process(message: str) -> NoReturn:
    """At once, with exit code 1: the thread that trains cannot."""
    if message:
        sys.stderr.write(f"trainyard: {message}\n")
        sys.stderr.flush()
    time.sleep(_HEAR_S)
    os._exit(1)
