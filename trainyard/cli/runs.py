"""`trainyard runs`: a table of the runs below a folder."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.cli.options import add_json, check_suffix
from trainyard.cli.printing import print_table, print_text, write_csv

if TYPE_CHECKING:
    from trainyard.report.listing import Row

_ORDERS = ("best", "name", "changed")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard runs` to its parser."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", nargs="?", default="runs", help="default: runs")
    add(
        "--sort",
        choices=_ORDERS,
        default="best",
        help="the best first (default), by name, or the last changed first",
    )
    add("--out", metavar="FILE.csv", help="write all values to a file too")
    add_json(parser)
    parser.set_defaults(run_command=runs)


def runs(options: argparse.Namespace) -> int:
    """Run `trainyard runs`. Returns the exit code."""
    check_suffix(options.out, "--out", ".csv")
    from trainyard.report.listing import Row, list_runs

    rows = list_runs(Path(options.folder), options.sort)
    if options.out:
        columns = [field.name for field in fields(Row)]
        values = [[getattr(row, name) for name in columns] for row in rows]
        write_csv("--out", Path(options.out), [columns, *values])
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_runs(rows)
    return 0


def print_runs(rows: "Sequence[Row]") -> None:
    """Print the table of runs, and why some of them failed."""
    from trainyard.report.listing import LEAST, table_of

    print_table(*table_of(rows), least=LEAST)
    print_text(*(f"{row.name}: {row.message}" for row in rows if row.message))
