"""The measurements of one part, saved after each: a part that is cut off keeps what it has."""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Tables = dict[str, list[Row]]  # rows by the heading of their table


class Findings:
    """Tables of rows; a row is a mapping from column to value."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tables: Tables = {}

    def add(self, table: str, row: Row) -> None:
        """Adds a row to a table, and saves all tables."""
        self._tables.setdefault(table, []).append(row)
        self._path.write_text(json.dumps(self._tables, indent=1) + "\n")
        print(f"{table}: {dict(row)}", flush=True)


def run_part(measure: Callable[[Findings, bool], None]) -> None:
    """The main function of a part: `measure(findings, dry)`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("findings", type=Path, help="JSON file to write")
    parser.add_argument("--dry", action="store_true", help="tiny models, on the CPU")
    options = parser.parse_args()
    measure(Findings(options.findings), options.dry)


def as_markdown(tables: Tables) -> str:
    """A table with a heading for each entry; columns in the order of their first appearance."""
    found = []
    for heading, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for row in rows:
            lines.append(f"| {' | '.join(_cell(row.get(column)) for column in columns)} |")
        found.append(f"### {heading}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(found)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


class Timer:
    """Wall-clock seconds inside the block."""

    seconds = 0.0

    def __enter__(self) -> "Timer":
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
