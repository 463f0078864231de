"""`trainyard doctor`: checks machines, network, disks and data."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.cli.options import add_json, loading
from trainyard.cli.train import config_of, run_folder
from trainyard.distributed import discover
from trainyard.errors import InputError
from trainyard.parent import end_with_launcher
from trainyard.printable import how_many, printable

if TYPE_CHECKING:
    from trainyard.config import RunConfig
    from trainyard.doctor.doctor import Findings

_SECONDS, _QUICK_SECONDS = 2.0, 0.3  # per measurement of speed
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard doctor` to its parser."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", nargs="?", help="a built-in name or a path to a TOML file")
    add("--data", metavar="LOCATION", action="append", help="data to look at, the recipe's if not")
    add("--run", metavar="DIR", help="where runs are to be written (runs/NAME of the recipe)")
    add("--quick", action="store_true", help="measure speeds for 0.3 s each, not for 2 s")
    add_json(parser)
    parser.epilog = (
        "Alone it examines this machine; started as a run is, by `trainyard launch LAUNCHER RECIPE "
        "--doctor`, torchrun, srun or mpirun, all machines and what is between them. The exit code "
        "is 1 if something fails."
    )
    parser.set_defaults(run_command=doctor, takes_overrides=True)


def doctor(options: argparse.Namespace) -> int:
    """Run `trainyard doctor`; returns the exit code."""
    end_with_launcher()
    config, world = _config(options), discover()
    with loading():
        from rich.console import Console

        from trainyard.doctor.check import Options
        from trainyard.doctor.doctor import examine

    settings = Options(
        config=config,
        run=run_folder(options) if options.recipe or options.run else Path("runs"),
        has_recipe=options.recipe is not None,
        seconds=_QUICK_SECONDS if options.quick else _SECONDS,
    )
    console = Console(stderr=True, quiet=options.json or not world.is_first)
    findings = examine(settings, world, console)
    if world.is_first and options.json:
        rows = [row._asdict() for row in findings.rows]
        print(json.dumps(findings._asdict() | {"rows": rows, "verdict": findings.verdict}))
    elif world.is_first:
        _print(findings)
    return 1 if findings.verdict == "fail" else 0


def _config(options: argparse.Namespace) -> "RunConfig":
    if options.recipe is not None:
        return config_of(options)
    if options.overrides:
        raise InputError(
            "option.key-without-recipe",
            "--{key} is a recipe key: name a RECIPE",
            key=next(iter(options.overrides)),
        )
    from trainyard.config import RunConfig, on_data

    config = RunConfig()
    return config if options.data is None else on_data(config, options.data, {})


def _print(findings: "Findings") -> None:
    from rich.text import Text

    from trainyard.cli.printing import print_table, print_text

    rows: list[list[str | Text]] = [
        [
            row.what,
            Text(row.verdict, style=_COLOURS[row.verdict]),
            Text("\n-> ").join(map(Text, map(printable, filter(None, (row.found, row.advice))))),
        ]
        for row in findings.rows
    ]
    print_table(["check", "", "found"], rows)
    print_text(*(f"Left out: {what}." for what in findings.left_out), _sentence(findings))


def _sentence(findings: "Findings") -> str:
    machines = how_many(findings.num_machines, "machine")
    where = f"{how_many(findings.num_ranks, 'rank')} on {machines}"
    warnings = how_many(sum(row.verdict == "warn" for row in findings.rows), "warning")
    if findings.verdict == "ok":
        return f"{where}: nothing is wrong."
    if findings.verdict == "warn":
        return f"{where}: {warnings}: this will train, but slowly or at a risk."
    failed = ", ".join(row.what for row in findings.rows if row.verdict == "fail")
    return f"{where}: not fit to train on ({failed}); {warnings}."
