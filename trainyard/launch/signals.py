"""Signals to a launcher, for as long as it has something to end."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Inside, these signals are handled, in place of what they do else.

    A SIGHUP that is ignored stays so: that is what nohup is for.
    """
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in numbers}
    if before.get(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
