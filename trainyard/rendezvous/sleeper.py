"""What becomes of the thread that trains if it does not hear of an alarm: another acts for it."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from trainyard.rendezvous.pulse import Pulse

_STUCK_S = 3  # in which a thread does nothing at all, though all connections are cut
_WAKE_S = 30  # for it to come back
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
        self._turn = threading.Lock()  # to act on the alarm: this thread's, or that of its deputy
        self.deputy: Callable[[], str | None] | None = None
        """What to do if it is stuck, where it does not use a GPU.

        It returns what to say at the end of this process, which follows; None: it can do nothing.
        """

    def wake(self) -> None:
        """It has heard. It does not come back from here if its deputy acts already."""
        with self._turn:
            self._is_awake.set()

    def wait(self, reason: str, *, speaks: bool) -> None:
        """Until it has heard; or end this process: without its deputy's help it `speaks`, or not.

        `reason`: why there is an alarm.
        """
        begun = since = time.monotonic()
        busy_s = self._pulse.busy_s()
        while not self._is_awake.wait(timeout=1):
            now, seen = time.monotonic(), self._pulse.look()
            if self._pulse.busy_s() > busy_s + _IDLE_S or not seen.waits:
                busy_s, since = self._pulse.busy_s(), now
            is_idle = now > since + _STUCK_S
            if self.deputy and is_idle:
                self._act(self.deputy, reason)
            waits = is_idle if self.deputy else seen.waits  # it may be in a long backward pass
            if now > begun + _WAKE_S and (waits or seen.is_overdue):
                end_process(reason if speaks else "")

    def _act(self, deputy: Callable[[], str | None], reason: str) -> None:
        with self._turn:
            if self._is_awake.is_set():
                return
            try:
                message = deputy()
            except Exception as error:  # of whatever was to be saved: this is the last thread
                message = f"{reason}; {error!r}"
            if message is not None:
                end_process(message)


def end_process(message: str) -> NoReturn:
    """At once, with exit code 1: the thread that trains cannot."""
    if message:
        sys.stderr.write(f"trainyard: {message}\n")
        sys.stderr.flush()
    time.sleep(_HEAR_S)
    os._exit(1)
