"""`trainyard predict`: predicts the classes of images."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from trainyard.commands.loading import loading
from trainyard.commands.options import (
    SECTIONS,
    add_checkpoint,
    check_overrides,
    check_target,
    positive,
)
from trainyard.errors import InputError
from trainyard.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from trainyard.classifier import Classifier
    from trainyard.commands.predict_tables import Predicted
    from trainyard.data.index.unlabelled import Images

_SHOWN = 10  # unreadable images listed with a reason


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard predict` to its parser."""
    add_checkpoint(parser)
    parser.add_argument(
        "images",
        metavar="IMAGE",
        nargs="+",
        help="an image file, a folder of them at any depth, a glob, the http(s) URL of an image, "
        "or a data set: tars, WebDataset, TFRecord, HDF5, packed files",
    )
    parser.add_argument(
        "--top",
        metavar="K",
        type=positive,
        default=5,
        help="number of classes per image; default: 5",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document with an entry per image"
    )
    parser.add_argument("--csv", metavar="FILE.csv", help="write a file with a line per image")
    parser.epilog = (
        "Recipe keys of the sections model, data and batch can be given as --SECTION.KEY VALUE, "
        "for example --data.eval_size 288. Unreadable images are listed and skipped; the exit "
        "code is 2 if no image can be read."
    )
    parser.set_defaults(run_command=predict, takes_overrides=SECTIONS)


def predict(options: argparse.Namespace) -> int:
    """Run `trainyard predict`. Returns the exit code."""
    check_overrides(options.overrides, "a prediction")
    check_target(options, options.images)
    if options.csv and not options.csv.endswith(".csv"):
        raise InputError(f"--csv {options.csv}: name a file that ends in .csv")
    from rich.console import Console

    from trainyard.data.index.unlabelled import open_images
    from trainyard.data.remarks import warn
    from trainyard.monitor.progress import counter

    console = Console(stderr=True)
    with TemporaryDirectory(prefix="trainyard-predict-") as folder:
        with counter(console, "looking for images") as show:
            found = open_images(options.images, Path(folder), show)
        accounts = [images.index.left_out for images in found if images.index.left_out]
        warn(console, [printable(f"left out: {left_out}") for left_out in accounts])
        with loading():  # after a look at the images: a wrong name is reported at once
            from trainyard.classifier import load
            from trainyard.commands.predict_tables import as_json, print_answers, write_answers
        classifier = load(options.target, ema=options.ema, overrides=options.overrides)
        answers = _answers(classifier, found, options.top, console)
    bad = _bad(answers)
    total = sum(len(images.index) for images, _ in answers)
    if len(bad) == total:
        name, reason = bad[0]
        more = "" if total == 1 else f"; of {total:,} images none can be read"
        raise InputError(f"{name}: {reason}{more}")
    if options.csv:
        write_answers(Path(options.csv), classifier, answers)
    if options.json:
        print(as_json(classifier, answers))
    else:
        print_answers(classifier, answers, options.csv)
    _complain(bad, total)
    return 0


def _answers(
    classifier: "Classifier", found: "Sequence[Images]", top: int, console: "Console"
) -> "list[Predicted]":
    from trainyard.commands.predict_tables import Predicted
    from trainyard.monitor.progress import counter

    answers = []
    total, done = sum(len(images.index) for images in found), 0
    with counter(console, "predicting", total) as show:
        for images in found:
            on_batch = partial(_counted_from, done, show)
            said = classifier.predict_index(images.index, top, on_batch=on_batch)
            said.bad.update(images.missing)
            answers.append(Predicted(images, said))
            done += len(images.index)
    return answers


def _counted_from(done: int, show: Callable[[int], None], begun: int) -> None:
    show(done + begun)


def _bad(answers: "Sequence[Predicted]") -> list[tuple[str, str]]:
    """Names of images without a prediction, with the reasons."""
    return [
        (images.name(number), reason)
        for images, said in answers
        for number, reason in said.bad.items()
    ]


def _complain(bad: Sequence[tuple[str, str]], total: int) -> None:
    for name, reason in bad[:_SHOWN]:
        print(printable(f"trainyard: {name}: {reason}"), file=sys.stderr)
    if len(bad) > 1:
        text = f"{len(bad):,} of {total:,} images cannot be read"
        print(f"trainyard: {text}", file=sys.stderr)
