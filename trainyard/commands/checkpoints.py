"""What commands have in common that use a trained model."""

import argparse
from collections.abc import Iterable

_SECTIONS = ("model", "data", "batch")  # of keys that a trained model can depend on


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN_OR_CHECKPOINT", help="of a run, its best checkpoint")
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="take the moving average of the weights, or the weights themselves; default: the "
        "average if there is one, unless it scored worse",
    )


def check_overrides(keys: Iterable[str], what: str) -> None:
    """RecipeError for keys that change nothing about what is done."""
    from trainyard.compare import check_keys

    check_keys(keys, _SECTIONS, what)
