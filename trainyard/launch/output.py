"""Output of ranks on several hosts, each line with its host."""

import io
import os
import sys
from collections.abc import Iterable
from typing import TextIO

_COLOURS = (36, 33, 35, 32, 34, 31)  # text colours of a terminal: cyan, yellow, magenta, …


def take_any_text() -> None:
    """Make stdout write a ? for characters that its encoding lacks, Latin-1 for instance."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class Printer:
    """Prints lines of ranks: their stdout to this stdout, their stderr to this stderr."""

    def __init__(self, hosts: Iterable[str], *, as_they_are: bool = False) -> None:
        """`as_they_are`: no prefix on stdout, since a program reads it."""
        self._number = {host: number for number, host in enumerate(hosts)}
        self._as_they_are = as_they_are
        take_any_text()

    def line(self, host: str, text: str, *, is_error: bool) -> None:
        """Print a line."""
        stream = sys.stderr if is_error else sys.stdout
        bare = self._as_they_are and not is_error
        stream.write(f"{'' if bare else self._prefix(host, stream)}{text}\n")
        stream.flush()

    def _prefix(self, host: str, stream: TextIO) -> str:
        text = f"{host} | "
        if not stream.isatty() or "NO_COLOR" in os.environ:
            return text
        colour = _COLOURS[self._number.get(host, 0) % len(_COLOURS)]
        return f"\x1b[{colour}m{text}\x1b[0m"
