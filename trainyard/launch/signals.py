"""Signal handlers that a launcher installs for a while."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


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
