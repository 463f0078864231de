"""A progress counter on the screen for long work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from trainyard.printable import printable

_PATIENCE_S = 2  # shorter work shows no counter
_REDRAW_S = 0.2
_ENOUGH = 20  # a 20th of the files tells the time left; before, many are read at once
_AT_ONCE_S = 1  # a first count this early is the work of an earlier attempt


class Show(Protocol):
    def __call__(self, count: int, files: tuple[int, int] | None = None, /) -> None:
        """Shows the count so far; `files`: the number of files done, and of all."""


@contextmanager
def counter(console: Console, what: str, total: int | None = None) -> Iterator[Show]:
    """Yields a function to call with the count so far; it draws after two seconds."""
    started = drawn = time.monotonic()
    before: int | None = None
    files_since, files_before = started, 0
    status = console.status("")

    def show(count: int, files: tuple[int, int] | None = None, /) -> None:
        nonlocal drawn, before, files_since, files_before
        now = time.monotonic()
        if before is None:
            before = count if now - started < _AT_ONCE_S else 0
        if files and files[0] < files_before:  # those of another data set
            files_since = now
        files_before = files[0] if files else 0
        if now - started > _PATIENCE_S and now - drawn > _REDRAW_S:
            drawn = now
            status.start()
            text = _text(what, count, total, (now - started) / max(count - before, 1))
            text += _files_text(files, now - files_since) if files else ""
            status.update(escape(printable(text)))

    try:
        yield show
    finally:
        status.stop()


def _text(what: str, count: int, total: int | None, seconds_each: float) -> str:
    text = f"{what}: {count:,} ({1 / seconds_each:,.0f} a second)"
    if total is None or not count:
        return text
    return f"{text} of {total:,}, {_left(seconds_each * (total - count))}"


def _files_text(files: tuple[int, int], seconds: float) -> str:
    done, total = files
    text = f", {done:,} of {total:,} files"
    if done * _ENOUGH < total:
        return text
    return f"{text}, {_left(seconds / done * (total - done))}"


def _left(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))} left"
