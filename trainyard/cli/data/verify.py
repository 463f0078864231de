"""`trainyard data verify`: checks that a data set is complete and fit to train on."""

import argparse
import json
from typing import TYPE_CHECKING

from trainyard.cli.data.index import add_division, add_location, division_of
from trainyard.cli.options import add_processes
from trainyard.cli.printing import print_table
from trainyard.errors import InputError
from trainyard.printable import printable

if TYPE_CHECKING:
    from trainyard.datasets.verify.checks import Check

_MAX_LINES = 20  # findings per check on a terminal


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data verify` to its parser."""
    add_location(parser)
    parser.description = (
        "Check a data set. A problem makes training fail or its result wrong; the exit code is "
        "then 2. A note is unusual, but training works."
    )
    parser.add_argument(
        "--deep", action="store_true", help="also decode every image and search for duplicates"
    )
    add_division(parser)
    add_processes(parser)
    parser.set_defaults(run_command=data_verify)


def data_verify(options: argparse.Namespace) -> int:
    """Run `trainyard data verify`. Returns the exit code."""
    from functools import partial

    from rich.console import Console

    from trainyard.data.index.splits import split_remarks
    from trainyard.data.open_datasets import warn
    from trainyard.data.storage.credentials import without_secrets
    from trainyard.datasets.verify.verify import verify
    from trainyard.monitor.progress import counter

    division = division_of(options)
    console = Console(stderr=True)
    warn(console, split_remarks(options.location))
    checks = verify(
        options.location,
        deep=options.deep,
        workers=options.processes,
        counters=partial(counter, console),
        division=division,
    )
    if options.json:
        print(without_secrets(json.dumps(_as_json(checks))))
    else:
        _print(checks)
    return InputError.exit_code if any(check.result == "problem" for check in checks) else 0


def _as_json(checks: "list[Check]") -> dict[str, object]:
    rows = [vars(check) | {"found": [row._asdict() for row in check.found]} for check in checks]
    return {"is_well": all(check.result != "problem" for check in checks), "checks": rows}


def _print(checks: "list[Check]") -> None:
    from trainyard.data.storage.credentials import without_secrets

    rows = [
        [
            check.data,
            check.name,
            check.result,
            f"{check.count:,}" if check.count else "",
            check.about,
        ]
        for check in checks
    ]
    print_table(["data", "check", "result", "found", "of"], rows)
    for result in ("problem", "note"):
        for check in (check for check in checks if check.result == result):
            print(printable(f"{result}: {check.data}: {check.name}"))
            for finding in check.found[:_MAX_LINES]:
                print(printable(f"  {without_secrets(str(finding))}"))
            if check.count > _MAX_LINES:
                print(f"  and {check.count - _MAX_LINES:,} more: --json lists them")
    problems = sum(check.count for check in checks if check.result == "problem")
    notes = sum(check.count for check in checks if check.result == "note")
    print(f"{_number(problems, 'problem')}, {_number(notes, 'note')}")


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
