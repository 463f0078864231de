"""Arguments and checks shared by commands that use a trained model."""

import argparse
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainyard.errors import CheckpointError, InputError
from trainyard.files import find_checkpoint

SECTIONS = ("model", "data", "batch")  # sections of recipe keys that a trained model can depend on


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a run or a checkpoint, and the choice of its weights."""
    parser.add_argument(
        "target", metavar="RUN_OR_CHECKPOINT", help="a run (its best checkpoint) or a checkpoint"
    )
    add_ema(parser, "the average, unless it scored worse")


def add_ema(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", default: str) -> None:
    """Add --ema, --no-ema and --ema-decay, all kept as `ema`."""
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="use the moving average of the weights, the best of several (--ema), or the weights "
        f"(--no-ema); default: {default}",
    )
    parser.add_argument(
        "--ema-decay",
        metavar="DECAY",
        dest="ema",
        type=float,
        help="use the moving average of this decay, of a run with several",
    )


def check_target(options: argparse.Namespace, others: Sequence[str]) -> None:
    """InputError if the run or checkpoint is not the first argument but a later one."""
    if is_checkpoint(options.target):
        return
    for place, other in enumerate(others):
        if is_checkpoint(other):
            rest = (options.target, *others[:place], *others[place + 1 :])
            raise InputError(
                f"{options.target}: neither a run directory nor a checkpoint; did you mean "
                f"{options.parser.prog} {shlex.join((other, *rest))}?"
            )


def is_checkpoint(target: str) -> bool:
    """True if a path is a checkpoint folder or a run directory with one."""
    try:
        find_checkpoint(Path(target))
    except CheckpointError:
        return False
    return True


def check_overrides(keys: Iterable[str], what: str) -> None:
    """RecipeError for keys that have no effect on the command."""
    from trainyard.compare import check_keys

    check_keys(keys, SECTIONS, what)
