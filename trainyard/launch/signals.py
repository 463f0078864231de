"""Signals that end a run, in the process of a launcher."""

import math
import queue
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from trainyard.errors import STOPS, Requeued, Stopped
from trainyard.parent import put_back_handlers

T = TypeVar("T")

IMPATIENT_S = 1.0
"""Seconds after which another Ctrl-C counts: an outer launcher may pass on that of a terminal."""
KILL_S = 5.0
"""Seconds for ranks to end after a second Ctrl-C."""
_LOOK_S = 0.2

REQUEUE_SIGNALS = tuple(number for number, stop in STOPS.items() if stop is Requeued)
"""Signals after which ranks save and end with 75."""


@contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Inside, `handler` handles these signals; afterwards the previous handlers are back.

    An ignored SIGHUP stays ignored, as nohup wants it.
    """
    before = {number: signal.signal(number, handler) for number in numbers}
    if before.get(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        put_back_handlers(before)


def next_event(events: "queue.SimpleQueue[T]", limit_s: float = math.inf) -> T:
    """The next event of a launcher, which its handlers of signals put too. queue.Empty at the end.

    The wait has slices: the kernel may give a signal to a thread that only reads, and Python runs
    its handler only once the main thread wakes.
    """
    deadline = time.monotonic() + limit_s
    while True:
        left_s = max(deadline - time.monotonic(), 0)
        try:
            return events.get(timeout=min(left_s, _LOOK_S))
        except queue.Empty:
            if left_s <= _LOOK_S:
                raise


def stopped_by(number: int) -> type[Stopped]:
    """The end of a launcher whose ranks have saved after a signal."""
    return STOPS[signal.Signals(number)]
