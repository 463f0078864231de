"""`trainyard calibrate`: a temperature that makes confidence the share of right guesses."""

import argparse
import json
from collections.abc import Iterable

from trainyard.api import evaluation_recipe
from trainyard.cli.evaluate import as_json, print_result
from trainyard.cli.options import SECTIONS, add_ema, add_target, check_target, loading
from trainyard.cli.printing import print_text
from trainyard.compare import PRACTICAL
from trainyard.distributed import discover
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
    add("--json", action="store_true", help="print the result as JSON")
    parser.epilog = (
        "The number that logits are divided by, for the lowest cross-entropy on validation data. "
        "It is kept in the checkpoint: evaluate, predict and export use it, and no guess changes."
    )
    parser.set_defaults(run_command=calibrate, takes_overrides=SECTIONS)


def calibrate(options: argparse.Namespace) -> int:
    """Run `trainyard calibrate`. Returns the exit code."""
    run_folder, checkpoint = check_target(options)
    _check_own_keys(options.overrides)
    from trainyard.data.index.merge import validation_splits
    from trainyard.monitor.terminal import EscapingConsole

    config = evaluation_recipe(
        run_folder, options.overrides, on_other_data=options.data is not None
    )
    data = tuple(validation_splits(options.data)) if options.data else None
    with loading():
        from trainyard.run.evaluation import EvaluationOptions, evaluate_checkpoint

    evaluation = EvaluationOptions(
        data=data,
        all_classes=options.all_classes,
        ema=options.ema,
        temperature=not options.remove,
    )
    world = discover()
    console = EscapingConsole(stderr=options.json, quiet=not world.is_first)
    result = evaluate_checkpoint(config, checkpoint, evaluation, world=world, console=console)
    if not world.is_first:
        return 0
    if options.json:
        print(json.dumps(as_json(result, None, None)))
        return 0
    print_result(result, None, None)
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
