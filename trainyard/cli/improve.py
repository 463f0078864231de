"""`trainyard improve`: a run that goes on from another with new images, and what it changed."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.arguments import fraction
from trainyard.cli.evaluate import check_one_label
from trainyard.cli.options import add_json, check_target, loading
from trainyard.cli.printing import print_text
from trainyard.cli.train import report_run
from trainyard.distributed import discover
from trainyard.errors import InputError
from trainyard.files import find_checkpoint
from trainyard.printable import how_many

if TYPE_CHECKING:
    from rich.console import Console

    from trainyard.config import RunConfig
    from trainyard.run.evaluation import DataSetResult
    from trainyard.world import World

_SHOWN = 5  # classes that moved, and images
_SHARE, _RATE = 0.5, 0.3


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard improve` to its parser."""
    add = parser.add_argument
    add("target", metavar="RUN", help="a run (its best checkpoint) or a checkpoint")
    text = "new images of old classes, of new ones, or of both, laid out as the run's data"
    add("images", metavar="NEW_IMAGES", nargs="+", help=text)
    text = f"share of the old images that each epoch has beside the new; default: {_SHARE}"
    add("--rehearse", metavar="SHARE", type=fraction, default=_SHARE, help=text)
    add("--run", metavar="DIR", help="run directory (RUN-improved)")
    add_json(parser)
    parser.epilog = (
        "The recipe is the run's, with its weights to begin with, its data and the new, and "
        f"{_RATE:g} times its optim.lr; any recipe key can be given as --SECTION.KEY VALUE. The "
        "run's validation images, the same before and after, tell what it cost."
    )
    parser.set_defaults(run_command=improve, takes_overrides=True)


def improve(options: argparse.Namespace) -> int:
    """Run `trainyard improve`. Returns the exit code."""
    run, checkpoint = check_target(options)
    from trainyard.config import load_recipe, override
    from trainyard.training.checkpoint import read_progress

    check_one_label("improve", read_progress(checkpoint).get("has_lists", False))

    old = load_recipe(str(run / "recipe.toml"))
    config = override(override(old, _changes(old, options)), options.overrides)
    folder = Path(options.run or f"{run}-improved")
    world = discover()
    with loading():
        from trainyard.monitor.terminal import EscapingConsole, console_of
        from trainyard.run import trainer
    console = console_of(world, is_quiet=options.json)
    outcome = trainer.train(config, folder, world=world, console=console)
    if outcome.stopped is not None:
        print_text(outcome.sentence())
        return outcome.stopped.exit_code
    quiet = EscapingConsole(stderr=True, quiet=options.json or not world.is_first)
    before, after = (
        _evaluated(*place, world=world, console=quiet)
        for place in ((run, checkpoint), find_checkpoint(folder))
    )
    if world.is_first:
        report_run(folder, is_printed=not options.json)
        found = {"run": str(folder)} | compare(before, after)
        if options.json:
            print(json.dumps(found))
        else:
            print_text(*_lines(found))
    return 0


def _changes(old: "RunConfig", options: argparse.Namespace) -> dict[str, Any]:
    """The keys of the new recipe that differ from the old one. InputError for a wrong share."""
    from trainyard.data.index.merge import merged_splits

    if not options.rehearse:
        raise InputError(
            "improve.no-rehearsal",
            "--rehearse 0: without old images the old classes are forgotten: give a share, 0.1 say",
        )
    data, is_divided = old.data, old.data.val is None and old.data.val_part is not None
    splits = merged_splits(options.images, may_share=True)
    train, val = (_listed(splits[split]) for split in ("train", "val"))
    if not (is_divided or val):
        raise InputError(
            "improve.no-val-data",
            "{images}: no val data in it, and {run} was validated on data of its own: put folders "
            "train and val, each with the classes, into it",
            images=options.images[0],
            run=options.target,
        )
    train = [*train, *val] if is_divided else train
    before = _listed(data.train)
    weights = data.weights or (1.0,) * len(before)
    return {
        "data.train": [*before, *train],
        "data.val": None if is_divided else [*_listed(data.val), *val],
        "data.weights": [*(options.rehearse * weight for weight in weights), *[1.0] * len(train)],
        "model.checkpoint": options.target,
        "model.checkpoint_key": None,
        "model.checkpoint_prefix": "",
        "model.class_names": {},
        "model.linear_probe": False,
        "optim.lr": _RATE * old.optim.lr,
    }


def _listed(locations: Any) -> list[str]:
    return [locations] if isinstance(locations, str) else [*(locations or ())]


def _evaluated(
    run: Path, checkpoint: Path, *, world: "World", console: "Console"
) -> "DataSetResult":
    """The evaluation of the weights that `predict` takes, on the run's own validation images."""
    from trainyard.api import evaluation_recipe
    from trainyard.run.evaluation import EvaluationOptions, evaluate_checkpoint
    from trainyard.run.pretrained import choose_weights
    from trainyard.training.checkpoint import read_progress

    name = choose_weights(checkpoint, read_progress(checkpoint))
    decay = name.partition("-")[2]
    options = EvaluationOptions(ema=float(decay) if decay else bool(name))
    return evaluate_checkpoint(
        evaluation_recipe(run), checkpoint, options, world=world, console=console
    )


def compare(before: "DataSetResult", after: "DataSetResult") -> dict[str, Any]:
    """What a run on more images changed. The first validation images of `after` are `before`'s.

    Top-1 of the old images before and after, of new images of old classes, and of new classes; the
    classes that moved most on the old images; old images that were right and are now taken for a
    new class.
    """
    import numpy as np

    (was,), (now,) = before.predictions.values(), after.predictions.values()
    names, labels, count = after.classes, after.labels, len(before.labels)
    is_old, is_read = np.arange(len(labels)) < count, now.is_read()
    added = [n for n, name in enumerate(names) if name not in before.classes]
    others = ~is_old & ~np.isin(labels, added)
    is_right, was_right = now.rank_of_truth == 1, np.zeros(len(labels), bool)
    was_right[:count] = was.rank_of_truth == 1

    def share(chosen: Any, **right: Any) -> dict[str, Any]:
        read = chosen & is_read
        count = int(read.sum())
        return {"samples": count} | {
            k: int((of & read).sum()) / max(count, 1) for k, of in right.items()
        }

    both = {"before": was_right, "after": is_right}
    old = np.unique(labels[is_old]).tolist()
    rows = [{"class": names[n]} | share(is_old & (labels == n), **both) for n in old]
    rows = [row for row in rows if row["before"] != row["after"]]
    against = np.flatnonzero(is_old & was_right & np.isin(now.guess, added)).tolist()
    return {
        "old_images": share(is_old, **both),
        "new_images_of_old_classes": share(others, top1=is_right),
        "new_classes": [{"class": names[n]} | share(labels == n, top1=is_right) for n in added],
        "moved": sorted(rows, key=lambda row: -abs(row["after"] - row["before"])),
        "against_old_labels": [_taken(after, n) for n in against],
    }


def _taken(result: "DataSetResult", sample: int) -> dict[str, Any]:
    """An image and what it is taken for."""
    (scores,), index = result.predictions.values(), result.data.index
    return {
        "file": index.locate(sample)[0],
        "class": result.classes[int(index.label[sample])],
        "guess": result.classes[int(scores.guess[sample])],
        "confidence": float(scores.confidence[sample]),
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """The comparison, for people."""
    yield f"old images: top-1 {_both(found['old_images'])}"
    if found["new_images_of_old_classes"]["samples"]:
        yield f"new images of old classes: {_one(found['new_images_of_old_classes'])}"
    yield from (f"new class {row['class']!r}: {_one(row)}" for row in found["new_classes"])
    moved = [f"{row['class']!r} {_both(row)}" for row in found["moved"][:_SHOWN]]
    if moved:
        yield f"moved most, of the classes of the old images: {', '.join(moved)}"
    against = found["against_old_labels"]
    for row in against[:_SHOWN]:
        what = f"{row['class']!r}, now taken for {row['guess']!r} ({row['confidence']:.1%})"
        yield f"{row['file']}: {what}"
    if against:
        yield (
            f"{how_many(len(against), 'old validation image')}, right before, now taken for a new "
            f"class; trainyard suspects {found['run']} shows those of training"
        )


def _one(row: dict[str, Any]) -> str:
    return f"{row['top1']:.1%} (n = {row['samples']:,})"


def _both(row: dict[str, Any]) -> str:
    return f"{row['before']:.1%} → {row['after']:.1%} (n = {row['samples']:,})"
