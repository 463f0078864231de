"""`trainyard evaluate`: the accuracy of a run or checkpoint on validation data."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.api import EVALUATED, check_evaluated, evaluation_recipe
from trainyard.commands.checkpoints import add_ema, check_target
from trainyard.commands.loading import loading
from trainyard.commands.numbers import positive
from trainyard.distributed import discover
from trainyard.errors import InputError

if TYPE_CHECKING:
    from trainyard.data.config import Locations


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard evaluate` to its parser."""
    parser.add_argument(
        "target", metavar="RUN_OR_CHECKPOINT", help="a run (its best checkpoint) or a checkpoint"
    )
    _add_data(parser.add_argument_group("data"))
    _add_variations(parser.add_argument_group("variations, named in the result"))
    _add_details(parser.add_argument_group("details"))
    parser.epilog = (
        "Recipe keys of the sections model, data, augment and batch can be given as --SECTION.KEY "
        "VALUE, for example --data.eval_size 288. On other data, the model chooses only among the "
        "classes that the data has, matched by name, as ImageNet-A and ImageNet-R intend."
    )
    parser.set_defaults(run_command=evaluate, takes_overrides=EVALUATED)


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        metavar="LOCATION",
        action="append",
        help="other validation data; several --data are one data set",
    )
    group.add_argument(
        "--also",
        metavar="LOCATION",
        action="append",
        default=[],
        help="a further data set with a result of its own; can be repeated",
    )
    group.add_argument(
        "--all-classes",
        action="store_true",
        help="choose among all classes of the model, also those that the data lacks",
    )
    group.add_argument(
        "--labels",
        metavar="FILE.json",
        help="also report top-1 by reassessed labels: ReaL's real.json for ImageNet",
    )


def _add_variations(group: argparse._ArgumentGroup) -> None:
    add_ema(group, "all of them")
    group.add_argument(
        "--flip",
        action="store_true",
        help="average the softmax of each image and of its mirror image",
    )
    group.add_argument(
        "--bn-samples",
        metavar="N",
        type=positive,
        default=0,
        help="first re-estimate batch norm statistics from N training images, cropped and flipped "
        "as in training (PreciseBN)",
    )


def _add_details(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--per-class", metavar="N", type=positive, help="print the N classes with the lowest top-1"
    )
    group.add_argument(
        "--confusions", metavar="N", type=positive, help="print the N most frequent confusions"
    )
    group.add_argument(
        "--predictions", metavar="FILE.csv", help="write the prediction for each image to a file"
    )
    group.add_argument(
        "--json", action="store_true", help="print the result as JSON; with --also, a list"
    )


def evaluate(options: argparse.Namespace) -> int:
    """Run `trainyard evaluate`. Returns the exit code."""
    _check(options)
    from trainyard.files import find_checkpoint
    from trainyard.monitor.escaping import EscapingConsole

    run_folder, checkpoint = find_checkpoint(Path(options.target))
    config = evaluation_recipe(run_folder, options.overrides)
    data = _data_sets(options)
    with loading():
        from trainyard.commands.evaluate_tables import as_json, print_results, write_predictions
        from trainyard.run.evaluation import EvaluationOptions, evaluate_checkpoint

    question = EvaluationOptions(
        data=data,
        all_classes=options.all_classes,
        labels=Path(options.labels) if options.labels else None,
        flip=options.flip,
        ema=options.ema,
        bn_samples=options.bn_samples,
    )
    world = discover()
    console = EscapingConsole(quiet=options.json or not world.is_first)
    results = evaluate_checkpoint(config, checkpoint, question, world=world, console=console)
    if not world.is_first:
        return 0
    if options.predictions:
        write_predictions(Path(options.predictions), results)
    if options.json:
        trees = [as_json(result, options.per_class, options.confusions) for result in results]
        print(json.dumps(trees if options.also else trees[0]))
    else:
        print_results(results, options.per_class, options.confusions)
    return 0


def _check(options: argparse.Namespace) -> None:
    check_evaluated(options.overrides)
    if options.predictions and not options.predictions.endswith(".csv"):
        raise InputError(f"--predictions {options.predictions}: name a file that ends in .csv")
    check_target(options)


def _data_sets(options: argparse.Namespace) -> "tuple[Locations | None, ...]":
    from trainyard.data.index.merge import validation_splits

    found = [tuple(validation_splits(locations)) for locations in ([o] for o in options.also)]
    if options.data is None:
        return (None, *found)
    return (tuple(validation_splits(options.data)), *found)
