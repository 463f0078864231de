"""Tables and texts on a terminal, and tables in files."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.errors import InputError
from trainyard.files import write_text
from trainyard.printable import csv_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_WIDE = 250  # columns


def print_table(
    columns: list[str], rows: Sequence[Sequence["str | Text"]], *, least: Sequence[str] = ()
) -> None:
    """Print rows as a table on stdout.

    `least`: columns that are left out, in this order, while the table is wider than the terminal;
    then the first column, a row's name, wraps alone. Without them all others wrap.
    """
    from rich import box
    from rich.table import Column, Table

    console = result_console()
    for count in range(len(least) + 1):
        kept = [n for n, name in enumerate(columns) if name not in least[:count]]
        first = Column(columns[0], no_wrap=not least, overflow="fold")
        others = (Column(columns[n], no_wrap=bool(least)) for n in kept[1:])
        table = Table(first, *others, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*(row[n] for n in kept))
        if (
            console.measure(table, options=console.options.update(width=_WIDE)).maximum
            <= console.width
        ):
            break
    console.print(table)


def empty_table(*columns: str) -> "Table":
    """A table without rows; columns whose names begin with ">" hold numbers, on the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        if name.startswith(">"):
            table.add_column(Text(name[1:]), justify="right", no_wrap=True)  # of several lines
        else:
            table.add_column(name, overflow="fold")
    return table


def print_text(*lines: str) -> None:
    """Print lines on stdout; on a terminal, long ones wrap between words."""
    console = result_console()
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal)


def result_console() -> "Console":
    """A console for results. Lines do not wrap unless it is a terminal."""
    from trainyard.monitor.terminal import EscapingConsole

    # A class may be called [a] or :cat:, or contain control characters.
    console = EscapingConsole(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def write_csv(option: str, path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a table to a file, its texts as in `csv_text`.

    InputError, which names the option, if that fails.
    """
    text = io.StringIO(newline="")
    csv.writer(text).writerows([csv_text(each) for each in row] for row in rows)
    with naming(option, path):
        write_text(path, text.getvalue(), errors="surrogateescape")


@contextmanager
def naming(option: str, path: Path) -> Iterator[None]:
    """Inside, the failure to write a file becomes an InputError that names the option for it."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "option.file-unwritable",
            "{option} {path}: cannot be written ({reason})",
            option=option,
            path=path,
            reason=error.strerror,
        ) from None
