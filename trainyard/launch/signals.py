"""Signals that end a run, in the process of a launcher."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainyard.errors import Requeued, Stopped

REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals after which ranks save and end with 75."""
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *REQUEUE_SIGNALS)


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
    kind = Requeued if number in REQUEUE_SIGNALS else Stopped
    return kind(f"stopped by {signal.Signals(number).name}")
