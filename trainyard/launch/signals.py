"""Signals that end a run, in the process of a launcher."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainyard.errors import STOPS, Requeued, Stopped

REQUEUE_SIGNALS = tuple(number for number, stop in STOPS.items() if stop is Requeued)
"""Signals after which ranks save and end with 75."""


@contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Inside, `handler` handles these signals; afterwards the previous handlers are back.

    An ignored SIGHUP stays ignored, as nohup wants it.
    """
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in numbers}
    if before.get(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def stopped_by(number: int) -> Stopped:
    """The error that ends a launcher whose ranks have saved after a signal."""
    name = signal.Signals(number)
    return STOPS[name](f"stopped by {name.name}")
