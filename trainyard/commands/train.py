"""`trainyard train`, and what every command that trains has in common with it."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.parent import end_with_launcher
from trainyard.rendezvous import discover

if TYPE_CHECKING:
    from trainyard.config import RunConfig


def add(parser: argparse.ArgumentParser) -> None:
    add_training_options(parser)
    parser.set_defaults(run_command=train)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a built-in name or a path to a TOML file")
    parser.add_argument(
        "--data",
        metavar="LOCATION",
        action="append",
        help="a data set with train and val data; of several, given one by one, train data is "
        "enough for all but one",
    )
    parser.add_argument("--run", metavar="DIR", help="run directory (runs/NAME of the recipe)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.epilog = (
        "Any recipe key can be given as --SECTION.KEY VALUE, --optim.lr 0.1 say; "
        "`trainyard recipes --keys` lists them."
    )
    parser.set_defaults(takes_overrides=True)


def train(options: argparse.Namespace) -> int:
    end_with_launcher()
    config, folder = config_of(options), run_folder(options)
    world = discover()
    from rich.console import Console

    from trainyard import run

    console = Console(quiet=options.json or not world.is_first)
    outcome = run.train(config, folder, world=world, console=console)
    if world.is_first:
        print(json.dumps(outcome.as_dict()) if options.json else outcome.sentence())
    return outcome.stopped.exit_code if outcome.stopped else 0


def config_of(options: argparse.Namespace) -> "RunConfig":
    """The recipe with the command line's overrides."""
    from trainyard.config import load_recipe
    from trainyard.data.merge import merged_splits

    overrides = dict(options.overrides)
    if options.data is not None:
        overrides |= {
            f"data.{split}": place for split, place in merged_splits(options.data).items()
        }
    return load_recipe(options.recipe, overrides)


def run_folder(options: argparse.Namespace) -> Path:
    return Path(options.run or Path("runs") / Path(options.recipe).stem)
