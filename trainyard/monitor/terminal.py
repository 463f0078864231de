"""Consoles: which of them show what, and what all of them do with names from users' files."""

import platform
import sys
import warnings
from io import TextIOBase
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from trainyard.printable import printable
from trainyard.world import World


class EscapingConsole(Console):
    """A console that shows control characters in texts and table cells as escapes.

    Colours and cursor movements made by rich itself stay. When its reader goes away, as under
    `| head`, the console is quiet and the work goes on: rich would end the program.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True


def console_of(
    world: World, *, is_quiet: bool = False, is_plain: bool = False, all_ranks: bool = False
) -> Console:
    """A rank's console: live on a terminal unless `is_plain`; muted on all but the first rank.

    With `all_ranks` each rank prints plain lines that begin with its rank and host.
    """
    if all_ranks and not is_quiet:
        prefix = f"[rank {world.rank} {platform.node()}] "
        return EscapingConsole(
            file=cast(TextIO, _Prefixed(sys.stdout, prefix)), force_terminal=False
        )
    is_mute = is_quiet or not world.is_first
    if is_notebook():  # lines of text, which rich would frame each
        # A dependency warns on import that it cannot draw widgets; none are used.
        warnings.filterwarnings("ignore", "IProgress not found")
        return EscapingConsole(quiet=is_mute, force_jupyter=False, force_terminal=False)
    return EscapingConsole(quiet=is_mute, force_terminal=False if is_plain else None)


def is_notebook() -> bool:
    """True in the kernel of a notebook."""
    return Console().is_jupyter


class _Prefixed(TextIOBase):
    """Writes whole lines, each in one piece, so that lines of several processes do not mix."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix, self._line = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)
