"""`trainyard calibrate`: a temperature that makes confidence the share of right guesses."""

import argparse
import json
from collections.abc import Iterable

from trainyard.cli.evaluate import as_json, evaluated, print_result
from trainyard.cli.options import SECTIONS, add_ema, add_json, add_target, check_target
from trainyard.cli.printing import print_text
from trainyard.compare import PRACTICAL
from trainyard.errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard calibrate` to its parser."""
    add_target(parser)
    add_ema(parser, "all of them")
    add = parser.add_argument
    about = "other data to fit on; several --data are one data set"
    add("--data", metavar="LOCATION", action="append", help=about)
    about = "choose among all classes of the model, also those that the data lacks"
    add("--all-classes", action="store_true", help=about)
    add("--remove", action="store_true", help="remove the temperatures of the checkpoint")
    add_json(parser)
    parser.epilog = (
        "The number that logits are divided by, for the lowest cross-entropy on validation data. "
        "It is kept in the checkpoint: evaluate, predict and export use it, and no guess changes."
    )
    parser.set_defaults(run_command=calibrate, takes_overrides=SECTIONS)
    parser.set_defaults(
        confusions=None, wrong=None, labels=None, flip=False, scales=(1.0,)
    )  # of `evaluate`


def calibrate(options: argparse.Namespace) -> int:
    """Run `trainyard calibrate`. Returns the exit code."""
    run_folder, checkpoint = check_target(options)
    _check_own_keys(options.overrides)
    result = evaluated(options, run_folder, checkpoint, temperature=not options.remove)
    if result is None:
        return 0
    if options.json:
        print(json.dumps(as_json(result)))
        return 0
    print_result(result)
    what = "without temperatures now" if options.remove else "their temperatures are in it now"
    print_text(f"{checkpoint}: {what}, for evaluate, predict and export")
    return 0


def _check_own_keys(keys: Iterable[str]) -> None:
    """InputError for a key with which a temperature would not be that of `predict` and `export`."""
    for key in keys:
        if key not in PRACTICAL and key != "batch.size":
            raise InputError(
                "temperature.other-keys",
                "predict and export use a temperature with the run's own keys: leave --{key} out",
                key=key,
            )
