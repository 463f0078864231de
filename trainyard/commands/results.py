"""`trainyard results`: the board of results as Markdown, or a new record on it."""

import argparse
import json
import sys
from pathlib import Path

from trainyard.commands.printing import result_console
from trainyard.errors import InputError

_OF_RECORDS = ("task", "name", "hardware", "note")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard results` to its parser."""
    parser.add_argument(
        "folder", nargs="?", default="results", metavar="FOLDER", help="the board (results)"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON, with every seed")
    record = parser.add_argument_group("a new record")
    record.add_argument(
        "--add", nargs="+", metavar="RUN", help="finished runs that differ in run.seed alone"
    )
    record.add_argument("--task", metavar="TASK", help="a folder of the board")
    record.add_argument("--name", metavar="NAME", help="the record is the folder TASK/DATE-NAME")
    record.add_argument("--hardware", metavar="TEXT", help="default: as the runs recorded it")
    record.add_argument("--note", metavar="TEXT", help="remarks, such as the load of the machine")
    parser.epilog = "The table of the board is written by: trainyard results > results/README.md"
    parser.set_defaults(run_command=results)


def results(options: argparse.Namespace) -> int:
    """Run `trainyard results`. Returns the exit code."""
    board = Path(options.folder)
    if options.add:
        return _add(board, options)
    for name in _OF_RECORDS:
        if getattr(options, name) is not None:
            raise InputError(f"--{name} is for a new record: add --add RUN")
    from trainyard.report.board import as_json, as_markdown

    if options.json:
        print(json.dumps(as_json(board)))
    elif sys.stdout.isatty():
        from rich.markdown import Markdown

        result_console().print(Markdown(as_markdown(board), hyperlinks=False))
    else:
        print(as_markdown(board), end="")
    return 0


def _add(board: Path, options: argparse.Namespace) -> int:
    if not options.task or not options.name:
        raise InputError("--add needs --task and --name")
    from trainyard.report.records import add_record

    record = add_record(
        board,
        [Path(run) for run in options.add],
        task=options.task,
        name=options.name,
        hardware=options.hardware or "",
        note=options.note or "",
    )
    print(json.dumps({"record": str(record)}) if options.json else f"{record}: added")
    return 0
