"""A progress counter on the screen for long work."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.markup import escape

from trainyard.printable import printable

_PATIENCE_S = 2  # shorter work shows no counter
_REDRAW_S = 0.2
_AT_ONCE_S = 1  # a first count this early is the work of an earlier attempt


@contextmanager
def counter(
    console: Console, what: str, total: int | None = None
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the count so far; it draws after two seconds."""
    started = drawn = time.monotonic()
    before: int | None = None
    status = console.status("")

    def show(count: int) -> None:
        nonlocal drawn, before
        now = time.monotonic()
        if before is None:
            before = count if now - started < _AT_ONCE_S else 0
        if now - started > _PATIENCE_S and now - drawn > _REDRAW_S:
            drawn = now
            status.start()
            seconds_each = (now - started) / max(count - before, 1)
            status.update(escape(printable(_text(what, count, total, seconds_each))))

    try:
        yield show
    finally:
        status.stop()


def _text(what: str, count: int, total: int | None, seconds_each: float) -> str:
    text = f"{what}: {count:,} ({1 / seconds_each:,.0f} a second)"
    if total is None or not count:
        return text
    left = timedelta(seconds=round(seconds_each * (total - count)))
    return f"{text} of {total:,}, {left} left"
