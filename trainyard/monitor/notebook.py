"""A console in a notebook that looks as in a terminal: redrawn in its place, in one output.
from trainyard.monitor.escaping import EscapingConsole

Rich's own way needs ipywidgets for anything that is redrawn, and puts a frame around each line.
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
_END_OF_REDRAWING = "\x1b[?25h"  # the cursor is shown again
_TOKEN = re.compile(
    r"\r|\n|\x1b\[\?25[hl]|\x1b\[2K|\x1b\[(?P<up>\d+)A|(?:[^\r\n\x1b]|\x1b\[[\d;]*m)+"
)


def notebook_console() -> Console | None:
    """A console for the cell that is running; None outside of a notebook."""
    if not Console().is_jupyter:
        return None
    # A library of ours would like to draw widgets, and says so when it is loaded; we draw none.
    warnings.filterwarnings("ignore", "IProgress not found")
    return EscapingConsole(
        file=cast(IO[str], Screen(_show())),
        force_terminal=True,
        force_jupyter=False,
        color_system="standard",  # the notebook's own theme, light or dark, says how they look
        width=_WIDTH,
        height=_HEIGHT,
    )


def _show() -> Callable[[str], None]:
    """What puts a text in the place of the one before, in the output of the cell."""
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
    """A terminal as far as rich needs one: lines, redrawn whole, and colours that pass through."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """`show` is given the whole text each time it has changed."""
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
