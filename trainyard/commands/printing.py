"""Tables and texts on a terminal."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainyard.monitor.units import in_bytes as size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_WIDE = 250  # columns

__all__ = ["print_table", "result_console", "size", "text"]


def print_table(columns: list[str], rows: Sequence[Sequence["str | Text"]]) -> None:
    """Print rows as a table on stdout."""
    from rich import box
    from rich.table import Column, Table

    # The first column, a row's name, does not wrap.
    table = Table(Column(columns[0], no_wrap=True), *columns[1:], box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    result_console().print(table)


def result_console() -> "Console":
    """A console for results. Lines do not wrap unless it is a terminal."""
    from trainyard.monitor.escaping import EscapingConsole

    # A class may be called [a] or :cat:, or contain control characters.
    console = EscapingConsole(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def text(value: Any) -> str:
    """A value as text: strings as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
