"""A counter on the screen for work that turns out to be long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

_PATIENCE_S = 2  # what takes less is done in silence
_REDRAW_S = 0.2


@contextmanager
def counter(console: Console, what: str) -> Iterator[Callable[[int], None]]:
    """A function to be called with the count so far; drawn once two seconds have passed."""
    started = drawn = time.monotonic()
    with console.status("") as status:
        status.stop()

        def show(count: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - started > _PATIENCE_S and now - drawn > _REDRAW_S:
                drawn = now
                status.start()
                rate = count / (now - started)
                status.update(f"{what}: {count:,} ({rate:,.0f} a second)")

        yield show
