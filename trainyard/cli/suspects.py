"""`trainyard suspects`: images that may have a wrong label, and a page to decide on each."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainyard.api import evaluation_recipe
from trainyard.arguments import positive
from trainyard.cli.evaluate import (
    Suspect,
    check_one_label,
    evaluated,
    suspects_of,
    write_suspects,
)
from trainyard.cli.options import SECTIONS, add_json, check_suffix, check_target
from trainyard.cli.printing import naming, print_text
from trainyard.printable import how_many

if TYPE_CHECKING:
    from trainyard.data.decode.rendering import Rendering
    from trainyard.data.index.corrections import Correction
    from trainyard.report.review import Reviewed
    from trainyard.run.evaluation import DataSetResult


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard suspects` to its parser."""
    add = parser.add_argument
    add(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run, for the images that it was trained on; or the runs of several folds "
        "(data.val_fold), each for the images that it was not trained on",
    )
    text = "folder for suspects.csv and suspects.html; default: that of the run, or the first"
    add("--out", metavar="FOLDER", help=text)
    text = "number of images on the page, the unlikeliest labels first; default: 500"
    add("--limit", metavar="N", type=positive, default=500, help=text)
    add_json(parser)
    parser.epilog = (
        "A suspect is an image that the model takes for another class, and whose label it gives "
        "a probability below 50%. On the page one decides by keyboard, and saves a list, which "
        "data.corrections takes; images in the run's own list are not shown again. A model that "
        "has learnt all labels by heart shows none: take the runs of folds then."
    )
    parser.set_defaults(run_command=suspects, takes_overrides=SECTIONS)
    parser.set_defaults(data=None, labels=None, all_classes=False, ema=None)  # of `evaluate`
    parser.set_defaults(confusions=None, wrong=None, flip=False, scales=(1.0,))


def suspects(options: argparse.Namespace) -> int:
    """Run `trainyard suspects`. Returns the exit code."""
    check_suffix(options.out, "--out", "")
    targets = []
    for run in options.runs:
        options.target = run
        targets.append(check_target(options))
    from trainyard.training.checkpoint import read_progress

    for _, checkpoint in targets:
        check_one_label("suspects", read_progress(checkpoint).get("has_lists", False))
    from trainyard.data.index.corrections import read_corrections
    from trainyard.report.review import write_review

    images, found = 0, []
    earlier: dict[Correction, None] = {}
    for folder, checkpoint in targets:
        split: Literal["train", "val"] = "train" if len(targets) == 1 else "val"
        config = evaluation_recipe(folder, options.overrides)
        decided = read_corrections(config.data.corrections) if config.data.corrections else []
        if (result := evaluated(options, folder, checkpoint, split=split)) is not None:
            images += len(result.data.index)
            found += _undecided(result, config.data.rendering, decided)
            earlier |= dict.fromkeys(decided)
    if not images:
        return 0  # another rank than the first
    once: dict[tuple[str, int], tuple[Suspect, Reviewed]] = {}  # runs may have the same images
    for one, row in sorted(found, key=lambda pair: -pair[0].loss):
        once.setdefault((row.file, row.key), (one, row))
    found = [*once.values()]
    folder = Path(options.out) if options.out else targets[0][0]
    with naming("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        shown = [row for _, row in found[: options.limit]]
        write_review(folder / "suspects.html", shown, earlier)
    write_suspects(folder / "suspects.csv", (one for one, _ in found))
    _print(options, len(found), images, folder)
    return 0


def _undecided(
    result: "DataSetResult", rendering: "Rendering", decided: "list[Correction]"
) -> "list[tuple[Suspect, Reviewed]]":
    """The suspects that are not in a list of corrections, also for the page."""
    from trainyard.data.index.corrections import corrected_samples
    from trainyard.report.pictures import Album
    from trainyard.report.review import SIDE, Reviewed

    index = result.data.index
    album = Album(index, rendering=rendering, side=SIDE)
    decided_on = corrected_samples(index, decided)
    found = []
    for one in (each for each in suspects_of(result) if each.sample not in decided_on):
        sample, columns = one.sample, result.predictions[one.prefix]
        row = Reviewed(
            file=index.locate(sample)[0],
            key=int(index.keys_in_file[sample]),
            label=result.classes[int(index.label[sample])],
            guess=result.classes[int(columns.guess[sample])],
            confidence=float(columns.confidence[sample]),
            classes=result.classes,
            album=album,
            sample=sample,
        )
        found.append((one, row))
    return found


def _print(options: argparse.Namespace, count: int, images: int, folder: Path) -> None:
    page, table = folder / "suspects.html", folder / "suspects.csv"
    if options.json:
        record = {"suspects": count, "images": images, "csv": str(table), "page": str(page)}
        print(json.dumps(record))
        return
    what = f"{how_many(count, 'image')} of {images:,} may have a wrong label: {table}"
    how = f"{page}: open it in a browser, decide, save the list, and train again with "
    how += "--data.corrections LIST.csv"
    none = "a model that has learnt all labels by heart shows none: take the runs of several folds"
    print_text(what, how if count else none)
