"""`trainyard evaluate`: the accuracy of a run or checkpoint on validation data."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.commands.printing import print_table
from trainyard.errors import CheckpointError
from trainyard.world import discover

if TYPE_CHECKING:
    from trainyard.config import RunConfig


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN_OR_CHECKPOINT", help="of a run, its best checkpoint")
    parser.add_argument(
        "--data", metavar="LOCATION", action="append", help="other validation data, also several"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run_command=evaluate)


def evaluate(options: argparse.Namespace) -> int:
    from trainyard.config import load_recipe

    run_folder, checkpoint = _find_checkpoint(Path(options.target))
    config = load_recipe(str(run_folder / "recipe.toml"))
    here = config.data.model_copy(update={"stage": None})  # that was a folder of other nodes
    config = config.model_copy(update={"data": here})
    if options.data is not None:
        config = _with_validation_data(config, options.data)
    world = discover()
    from rich.console import Console

    from trainyard import run

    console = Console(quiet=options.json or not world.is_first)
    result = run.evaluate_checkpoint(config, checkpoint, world=world, console=console)
    if world.is_first and options.json:
        print(json.dumps(result.as_dict()))
    elif world.is_first:
        accuracies = [f"{result.top1:.2%}", f"{result.top5:.2%}", f"{result.loss:.4f}"]
        row = [f"{result.samples:,}", f"{result.bad:,}", *accuracies]
        print_table(["samples", "unreadable", "top-1", "top-5", "loss"], [row])
    return 0


def _with_validation_data(config: "RunConfig", locations: list[str]) -> "RunConfig":
    from trainyard.data.merge import validation_splits

    found = validation_splits(locations)
    val = {"val": found[0] if len(found) == 1 else tuple(found)}
    return config.model_copy(update={"data": config.data.model_copy(update=val)})


def _find_checkpoint(target: Path) -> tuple[Path, Path]:
    """The run directory and the checkpoint that a run or checkpoint path means."""
    if (target / "checkpoints").is_dir():
        for name in ("best", "latest"):
            if (target / "checkpoints" / name).exists():
                return target, (target / "checkpoints" / name).resolve()
        raise CheckpointError(f"{target}: has no checkpoint yet")
    if (target / "manifest.json").is_file():
        return target.resolve().parent.parent, target.resolve()
    raise CheckpointError(f"{target}: neither a run directory nor a checkpoint")
