"""A notebook console that works like a terminal: it redraws in place, in one output.

Rich's own support needs ipywidgets for live displays, and frames each line.
"""

import importlib
import io
import re
import time
import warnings
from collections.abc import Callable
from typing import IO, Any, cast

from rich.console import Console

from trainyard.monitor.escaping import EscapingConsole

_REDRAW_S = 0.25
_WIDTH, _HEIGHT = 100, 40  # characters; about what a cell shows without scrolling
_END_OF_REDRAWING = "\x1b[?25h"  # shows the cursor again
_TOKEN = re.compile(
    r"\r|\n|\x1b\[\?25[hl]|\x1b\[2K|\x1b\[(?P<up>\d+)A|(?:[^\r\n\x1b]|\x1b\[[\d;]*m)+"
)


def notebook_console() -> Console | None:
    """A console for the cell that is running; None outside of a notebook."""
    if not Console().is_jupyter:
        return None
    # A dependency warns on import that it cannot draw widgets; none are used.
    warnings.filterwarnings("ignore", "IProgress not found")
    return EscapingConsole(
        file=cast(IO[str], Screen(_show())),
        force_terminal=True,
        force_jupyter=False,
        color_system="standard",  # the notebook's theme defines the colours
        width=_WIDTH,
        height=_HEIGHT,
    )


def _show() -> Callable[[str], None]:
    """A function that replaces the text in the cell's output."""
    display = importlib.import_module("IPython.display").display
    handles: list[Any] = []

    def show(text: str) -> None:
        bundle = {"text/plain": text}
        if handles:
            handles[0].update(bundle, raw=True)
        else:
            handles.append(display(bundle, raw=True, display_id=True))

    return show


class Screen(io.TextIOBase):
    """A minimal terminal for rich: lines that are redrawn whole, and colours."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """`show` receives the whole text each time it changes."""
        self._show = show
        self._lines = [""]
        self._row = 0
        self._is_at_start = True
        self._shown = ""
        self._drawn = 0.0

    def write(self, text: str) -> int:
        for token in _TOKEN.finditer(text):
            self._take(token[0], int(token["up"] or 0))
        is_redraw = "\x1b[2K" in text and _END_OF_REDRAWING not in text
        if not is_redraw or time.monotonic() - self._drawn >= _REDRAW_S:
            self._draw()
        return len(text)

    def _take(self, token: str, up: int) -> None:
        if token == "\n":
            self._row += 1
            self._is_at_start = True
            if self._row == len(self._lines):
                self._lines.append("")
        elif token == "\r":
            self._is_at_start = True
        elif token == "\x1b[2K":
            self._lines[self._row] = ""
        elif up:
            self._row = max(self._row - up, 0)
        elif not token.startswith("\x1b[?"):
            self._lines[self._row] = token if self._is_at_start else self._lines[self._row] + token
            self._is_at_start = False

    def _draw(self) -> None:
        text = "\n".join(self._lines).rstrip("\n")
        if text != self._shown:
            self._shown, self._drawn = text, time.monotonic()
            self._show(text)
