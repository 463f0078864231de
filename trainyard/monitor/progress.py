"""Bars on a terminal and in a notebook, and the progress of long work."""

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    RenderableColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from trainyard.monitor.terminal import is_notebook
from trainyard.printable import printable

_PATIENCE_S = 2  # shorter work shows no progress
_REDRAWN_HZ = 4


class Bar(Progress):
    """rich's progress at the foot of a terminal or in the output of a notebook's cell; else none.

    In a notebook rich's own needs ipywidgets. Here it is drawn again whenever it is updated.
    """

    def __init__(
        self, *columns: str | ProgressColumn, console: Console, transient: bool = False
    ) -> None:
        self._is_in_cell = is_notebook() and not console.quiet and console.file is sys.stdout
        self._cell: Any = None
        self._drawn = 0.0
        self.is_shown = self._is_in_cell or (console.is_interactive and not console.quiet)
        super().__init__(
            *columns,
            console=console,
            transient=transient,
            refresh_per_second=_REDRAWN_HZ,
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),  # `2> FILE` gets what it asks for
            get_time=time.monotonic,
            disable=self._is_in_cell or not self.is_shown,
        )

    def start(self) -> None:
        super().start()
        if self._is_in_cell and self._cell is None:
            display = importlib.import_module("IPython.display").display
            self._cell = display(self, display_id=True)

    def update(self, *arguments: Any, **options: Any) -> None:
        super().update(*arguments, **options)
        if self._cell is not None and time.monotonic() - self._drawn >= 1 / _REDRAWN_HZ:
            self._drawn = time.monotonic()
            self._cell.update(self)

    def stop(self) -> None:
        super().stop()
        if self._cell is not None:
            for task in self.tasks if self.live.transient else ():
                task.visible = False
            self._cell.update(self)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


class Show(Protocol):
    def __call__(self, count: int, files: tuple[int, int] | None = None, /) -> None:
        """Shows the count so far; `files`: the number of files done, and of all."""


@contextmanager
def counter(console: Console, what: str, total: int | None = None) -> Iterator[Show]:
    """Yields a function to call with the count so far; it shows progress after two seconds.

    The time left is that of the files, where their number is known and `total` is not.
    """
    times = TimeElapsedColumn(), "passed,", TimeRemainingColumn(), "left"
    name = RenderableColumn(Text(printable(what), no_wrap=True, overflow="ellipsis"))
    columns = name, BarColumn(10), "{task.fields[count]}", *times
    bar = Bar(*columns, console=console, transient=True)
    task = bar.add_task("", total=total, count="")
    begun, drawn = time.monotonic(), 0.0

    def show(count: int, files: tuple[int, int] | None = None, /) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn < 1 / _REDRAWN_HZ:
            return
        drawn = now
        done, of = files if files and total is None else (count, total)
        text = f"{count:,}" + (f", {files[0]:,} of {files[1]:,} files" if files else "")
        text += "" if total is None else f" of {total:,}"
        bar.update(task, completed=done, total=of, count=text)
        if now - begun > _PATIENCE_S:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()
