"""How results look on a terminal."""

import json
from typing import Any


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    # What a row is about stays in one piece.
    table = Table(Column(columns[0], no_wrap=True), *columns[1:], box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)  # a class may be called [a]


def text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def size(num_bytes: float) -> str:
    """1.28 MB and the like."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"
