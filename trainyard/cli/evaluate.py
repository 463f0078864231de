"""`trainyard evaluate`: the accuracy of a run or checkpoint on validation data."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from trainyard.api import evaluation_recipe
from trainyard.arguments import Parser, positive
from trainyard.cli.options import (
    SECTIONS,
    add_ema,
    add_json,
    add_others,
    add_outs,
    add_target,
    add_views,
    check_suffix,
    check_target,
    is_export,
    loading,
    others_of,
    outs,
)
from trainyard.cli.printing import empty_table, naming, print_text, result_console, write_csv
from trainyard.distributed import discover
from trainyard.errors import InputError
from trainyard.files import finite
from trainyard.monitor.history import shows_top5
from trainyard.printable import how_many
from trainyard.training.weight_names import label_of

if TYPE_CHECKING:
    from rich.table import Table

    from trainyard.run.evaluation import DataSetResult, EvaluationOptions
    from trainyard.training.label_scores import LabelScores
    from trainyard.training.predictions import Predictions

_SHARES = {
    "top1": "top-1",
    "top5": "top-5",
    "balanced_accuracy": "balanced",
    "map": "mAP",
    "micro_f1": "micro\nF1",
    "macro_f1": "macro\nF1",
}
_OF_CLASSES = {
    "recall": "recall",
    "precision": "precision",
    "average_precision": "AP",
    "f1": "F1",
    "top5": "top-5",
}
_WIDTH = 80  # characters; lines wrap in a narrower terminal, so that no column is lost
_ORIGIN = ("data", "weights", "sample", "file", "offset")
_COLUMNS = (*_ORIGIN, "class", "guess", "confidence", "place")
_LIST_COLUMNS = (*_ORIGIN, "labels", "guesses", "loss")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard evaluate` to its parser."""
    add_target(parser, ", or an exported file")
    add = parser.add_argument_group("what to read").add_argument
    add(
        "--data",
        metavar="LOCATION",
        action="append",
        help="other validation data; several --data are one data set",
    )
    add(
        "--labels",
        metavar="FILE.json",
        help="also report top-1 by reassessed labels: ReaL's real.json for ImageNet",
    )
    how = parser.add_argument_group("how to evaluate")
    add_others(how)
    add_ema(how, "all of them; with several runs the average, unless it scored worse")
    add_views(how)
    how.add_argument(
        "--all-classes",
        action="store_true",
        help="choose among all classes of the model, also those that the data lacks",
    )
    _add_output(parser.add_argument_group("what to print and to write"))
    parser.epilog = (
        "Recipe keys of the sections model, data and batch can be given as --SECTION.KEY "
        "VALUE, for example --data.eval_size 288. On other data, the model chooses only among the "
        "classes that the data has, matched by name, as ImageNet-A and ImageNet-R intend."
    )
    parser.set_defaults(run_command=evaluate, takes_overrides=SECTIONS)


def _add_output(group: Parser) -> None:
    add = group.add_argument
    add(
        "--per-class", metavar="N", type=positive, help="print the N classes with the lowest recall"
    )
    add("--confusions", metavar="N", type=positive, help="print the N most frequent confusions")
    add(
        "--wrong",
        metavar="N",
        type=positive,
        help="print N images taken for another class, the highest loss first",
    )
    add_outs(
        group,
        "FILE.csv: write the prediction for each image; FOLDER: write classes.csv, confusions.csv "
        "(the confusion matrix), reliability.csv, and suspects.csv, the images whose label the "
        "model takes for unlikely, the unlikeliest first (with --data TRAIN of the training data)",
    )
    add_json(group)


def evaluate(options: argparse.Namespace) -> int:
    """Run `trainyard evaluate`. Returns the exit code."""
    for path in options.out:
        check_suffix(path, "--out", ".csv", "")
    result: DataSetResult | None
    if is_export(options):
        result = _of_export(options)
    else:
        result = evaluated(options, *check_target(options), others=others_of(options))
    if result is None:
        return 0
    written = [*_write(options, result)]
    counts = options.per_class, options.confusions, options.wrong
    if options.json:
        print(json.dumps(as_json(result, *counts)))
    else:
        print_result(result, *counts)
        print_text(*(f"written: {path}" for path in written))
    return 0


def _of_export(options: argparse.Namespace) -> "DataSetResult":
    """The result of an exported file."""
    from trainyard.monitor.terminal import EscapingConsole

    if options.data is None:
        raise InputError(
            "option.export-without-data",
            "{path}: an exported file knows no data: name them by --data LOCATION",
            path=options.target,
        )
    evaluation = _evaluation(options)
    from trainyard.export.load import load_export
    from trainyard.run.evaluation import evaluate_model

    classifier = load_export(options.target)
    _check_counts(options, classifier.has_lists)
    return evaluate_model(
        classifier.config,
        classifier.model,
        classifier.classes,
        evaluation,
        feeds=classifier.feeds(),
        has_lists=classifier.has_lists,
        console=EscapingConsole(stderr=options.json),
    )


def evaluated(
    options: argparse.Namespace,
    run_folder: Path,
    checkpoint: Path,
    *,
    others: Sequence[tuple[Path, Path]] = (),
    temperature: bool | None = None,
    split: Literal["train", "val"] = "val",
) -> "DataSetResult | None":
    """The result; None on all ranks but the first. For keywords see EvaluationOptions."""
    from trainyard.monitor.terminal import EscapingConsole

    config, *configs = (
        evaluation_recipe(folder, options.overrides, on_other_data=options.data is not None)
        for folder in (run_folder, *(run for run, _ in others))
    )
    each = [(one, path) for one, (_, path) in zip(configs, others, strict=True)]
    evaluation = _evaluation(options, temperature=temperature, split=split, others=each)
    from trainyard.run.evaluation import evaluate_checkpoint
    from trainyard.training.checkpoint import read_progress

    _check_counts(options, read_progress(checkpoint).get("has_lists", False))
    world = discover()
    console = EscapingConsole(stderr=options.json, quiet=not world.is_first)
    result = evaluate_checkpoint(config, checkpoint, evaluation, world=world, console=console)
    return result if world.is_first else None


def _evaluation(options: argparse.Namespace, **others: Any) -> "EvaluationOptions":
    """What the options of the command say; loads torch."""
    from trainyard.data.index.merge import validation_splits

    data = tuple(validation_splits(options.data)) if options.data else None
    with loading():
        from trainyard.run.evaluation import EvaluationOptions
        from trainyard.training.evaluate import Views

    return EvaluationOptions(
        data=data,
        all_classes=options.all_classes,
        labels=Path(options.labels) if options.labels else None,
        views=Views(options.flip, options.scales),
        ema=options.ema,
        **others,
    )


def _check_counts(options: argparse.Namespace, has_lists: bool) -> None:
    for name in ("confusions", "wrong"):
        if getattr(options, name) is not None:
            check_one_label(f"--{name}", has_lists)


def check_one_label(option: str, has_lists: bool) -> None:
    """InputError for an option about the one label of an image, where images have lists of them."""
    if has_lists:
        raise InputError(
            "option.beside-lists",
            "{option}: is for images with one label each, and these have lists of labels",
            option=option,
        )


def _write(options: argparse.Namespace, result: "DataSetResult") -> Iterator[Path]:
    """Write the files that are wanted, and yield their paths."""
    for path in outs(options, ".csv"):
        write_predictions(path, result)
        yield path
    for folder in outs(options, ""):
        yield from write_tables(folder, result)


def as_json(
    result: "DataSetResult",
    num_classes: int | None = None,
    num_confusions: int | None = None,
    num_wrong: int | None = None,
) -> dict[str, Any]:
    """A result; its worst classes, frequent confusions and wrong images, unless they are None."""
    tree = result.as_dict()
    if num_wrong is not None:
        tree["wrong"] = _wrong(result, num_wrong)
    for prefix, columns in result.predictions.items():
        if not _has_lists(result):
            tree[f"{prefix}reliability"] = _reliability(columns)
        if num_classes is not None:
            tree[f"{prefix}per_class"] = _classes(result, columns, num_classes)
        if num_confusions is not None:
            tree[f"{prefix}confusions"] = _confusions(result, columns, num_confusions)
    return cast(dict[str, Any], finite(tree))


def _has_lists(result: "DataSetResult") -> bool:
    return result.data.index.lists is not None


def _classes(
    result: "DataSetResult", columns: "Predictions | LabelScores", count: int
) -> list[dict[str, Any]]:
    from trainyard.training.predictions import Predictions, per_class

    if isinstance(columns, Predictions):
        rows: list[Any] = per_class(columns, result.labels)
        keys: tuple[str, ...] = ("samples", "guesses", "recall", "precision", "f1", "top5")
    else:
        rows = [row for row in columns.per_class(result.labels) if row.samples]
        keys = ("samples", "average_precision", "f1")
    return [
        {"class": result.classes[row.label], **{key: getattr(row, key) for key in keys}}
        for row in rows[:count]
    ]


def _confusions(
    result: "DataSetResult", columns: "Predictions", count: int | None, *, with_right: bool = False
) -> list[dict[str, Any]]:
    from trainyard.training.predictions import confusions

    names = result.classes
    return [
        {"class": names[row.label], "guess": names[row.guess], "samples": row.samples}
        for row in confusions(columns, result.labels, count, with_right=with_right)
    ]


def _wrong(result: "DataSetResult", count: int) -> list[dict[str, Any]]:
    """The images that are taken for another class, by the best weights; the highest loss first."""
    prefix = _best(result)
    columns = result.predictions[prefix]
    wrong = (columns.rank_of_truth > 1).nonzero()[0]
    order = wrong[(-columns.loss[wrong]).argsort(kind="stable")][:count].tolist()
    rows = (dict(zip(_COLUMNS, line, strict=True)) for line in _lines(result, prefix, order))
    keys = ("file", "offset", "class", "guess")
    return [
        {k: row[k] for k in keys} | {"confidence": float(str(row["confidence"]))} for row in rows
    ]


def _reliability(columns: "Predictions") -> list[dict[str, Any]]:
    from trainyard.training.reliability import reliability

    return [row._asdict() for row in reliability(columns)]


# --- on a terminal ---


def print_result(
    result: "DataSetResult",
    num_classes: int | None = None,
    num_confusions: int | None = None,
    num_wrong: int | None = None,
) -> None:
    """Print a table with a row for each set of weights, and notes on its numbers.

    Then the worst classes, the most frequent confusions and wrong images, by the weights with the
    higher top-1, or mAP; None leaves them out.
    """
    console = result_console()
    console.width = max(console.width, _WIDTH)
    tree = result.as_dict()
    console.print(_overview(tree, list(result.predictions)))
    print_text(*filter(None, [result.mean]), *_apart(tree, list(result.predictions)))
    print_text(*_notes(tree, list(result.predictions)))
    prefix = _best(result)
    columns, of = result.predictions[prefix], f"{result.data.where}, {_which(prefix)}"
    if num_classes is not None:
        rows = _classes(result, columns, num_classes)
        print_text("", f"The {len(rows)} worst of {len(result.classes):,} classes ({of})")
        keys = [key for key in _shown(_OF_CLASSES, tree) if rows and key in rows[0]]
        table = empty_table("class", ">samples", *(f">{_OF_CLASSES[key]}" for key in keys))
        for row in rows:
            shares = (f"{row[key]:.1%}" for key in keys)
            table.add_row(row["class"], f"{row['samples']:,}", *shares)
        console.print(table)
    if num_confusions is not None:
        print_text("", f"The most frequent wrong guesses ({of})")
        table = empty_table("class", "taken for", ">samples")
        for row in _confusions(result, columns, num_confusions):
            table.add_row(row["class"], row["guess"], f"{row['samples']:,}")
        console.print(table)
    if num_wrong is not None:
        print_text("", f"Wrong images, the highest loss first ({of})")
        for row in _wrong(result, num_wrong):
            where = f"{row['file']}, byte {row['offset']:,}" if row["offset"] else row["file"]
            text = f"{where}: {row['class']}, taken for {row['guess']} ({row['confidence']:.1%})"
            console.print(text, soft_wrap=True)  # a path that wraps is not one to copy


def _which(prefix: str) -> str:
    """The weights with this prefix, in a sentence; of several runs "mean" and "run 1"."""
    is_of_runs = prefix.startswith(("mean", "run"))
    return label_of(prefix) + " weights" * (not is_of_runs)


def _best(result: "DataSetResult") -> str:
    """The prefix of the weights with the higher top-1, or mAP."""
    tree = result.as_dict()
    key = "map" if any(name.endswith("map") for name in tree) else "top1"
    return max(result.predictions, key=lambda prefix: float(tree[f"{prefix}{key}"]))


def _overview(tree: dict[str, Any], prefixes: list[str]) -> "Table":
    one = prefixes[0]
    shares = [key for key in _shown(_SHARES, tree) if one + key in tree]
    rest = {key: name for key, name in (("loss", "loss"), ("ece", "ECE")) if one + key in tree}
    again = ["new top-1"] if "reassessed" in tree else []
    numbers = ["samples", *(_SHARES[key] for key in shares), *rest.values(), *again]
    table = empty_table("data", *(f">{name}" for name in numbers))
    for number, prefix in enumerate(prefixes):
        row = [
            f"{tree['samples']:,}",
            *(f"{tree[prefix + key]:.2%}" for key in shares),
            *(f"{tree[prefix + key]:.4f}" for key in rest),
            *(f"{tree['reassessed'][prefix + 'top1']:.2%}" for _ in again),
        ]
        first = f"{tree['data']}, {label_of(prefix)}" if prefix else tree["data"]
        table.add_row(f"  {label_of(prefix)}" if number else first, *row)
    return table


def _shown(keys: Iterable[str], tree: dict[str, Any]) -> list[str]:
    return [key for key in keys if key != "top5" or shows_top5(tree["classes"])]


def _notes(tree: dict[str, Any], prefixes: list[str]) -> Iterator[str]:
    """Notes that are needed to compare the numbers with others."""
    where = tree["data"]
    is_named = len(prefixes) > 1
    which = {prefix: f"{_which(prefix)}: " if is_named else "" for prefix in prefixes}
    if "ema_decay" in tree and is_named:
        yield f"the best average of the run's last evaluation: EMA {tree['ema_decay']}"
    for prefix in (each for each in prefixes if f"{each}top1_interval" in tree):
        low, high = tree[f"{prefix}top1_interval"]
        yield f"{which[prefix]}95% interval of top-1 (Wilson): {low:.2%} to {high:.2%}"
    for prefix in (each for each in prefixes if f"{each}temperature" in tree):
        value = f"{tree[f'{prefix}temperature']:g}{''.join(_changes(tree, prefix))}"
        yield f"{which[prefix]}logits divided by the temperature {value}"
    if tree["flip"] or tree["scales"] != [1]:
        kind = "sigmoid" if "map" in tree else "softmax"
        mirrored = " and of its mirror image" if tree["flip"] else ""
        scales = " and ".join(f"{scale:g}" for scale in tree["scales"])
        at = "" if scales == "1" else f", at the scales {scales}"
        yield f"averaged at test time: the {kind} of each image{mirrored}{at}"
    if tree["classes"] < tree["model_classes"]:
        of = f"{tree['classes']:,} of {tree['model_classes']:,} classes"
        yield f"{where}: guesses among its {of} alone"
    if tree["bad"]:
        one = max(tree["bad_reasons"], key=lambda row: row["samples"])
        others = f" and {how_many(one['samples'] - 1, 'other')}" if one["samples"] > 1 else ""
        bad = f"left out {how_many(tree['bad'], 'image')} that cannot be read"
        yield f"{where}: {bad}: {one['file']}{others}: {one['reason']}"
    for prefix in prefixes:
        if count := tree[f"{prefix}not_finite"]:
            yield f"{where}, {_which(prefix)}: {count:,} images get scores that are not finite"
    if "reassessed" in tree:
        again = tree["reassessed"]
        yield f"{where}: new top-1 on the {again['samples']:,} images in {again['labels']}"


def _apart(tree: dict[str, Any], prefixes: list[str]) -> Iterator[str]:
    """Top-1 of classes that the initial weights had, and of new ones."""
    for prefix in prefixes if "new_samples" in tree else []:
        old, new = (
            f"{tree[f'{prefix}{name}_top1']:.2%} of {how_many(tree[f'{name}_samples'], 'image')}"
            for name in ("old", "new")
        )
        which = f"{_which(prefix)}: " if len(prefixes) > 1 else ""
        yield f"{which}top-1 of the classes of the initial weights {old}, of new classes {new}"


def _changes(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    """Loss and ECE before and after the fit of a temperature; nothing without a fit."""
    for key, name in (("loss", "loss"), ("ece", "ECE")):
        if f"{prefix}{key}_before" in tree:
            was, now = tree[f"{prefix}{key}_before"], tree[f"{prefix}{key}"]
            yield f"; {name} {was:.4f} before the fit, {now:.4f} after it"


# --- files ---


def write_tables(folder: Path, result: "DataSetResult") -> Iterator[Path]:
    """Write the tables of classes, and for one label each of pairs, of confidence and suspects.

    Yields the path of each.
    """
    tables: dict[str, list[dict[str, Any]]] = {"classes": []}
    for prefix, columns in result.predictions.items():
        where = {"data": result.data.where, "weights": label_of(prefix)}
        records = {"classes": _classes(result, columns, len(result.classes))}
        if not _has_lists(result):
            records["confusions"] = _confusions(result, columns, None, with_right=True)
            records["reliability"] = _reliability(columns)
        for name, rows in records.items():
            tables.setdefault(name, []).extend(where | row for row in rows)
    with naming("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        head = [list(rows[0])] if rows else []
        write_csv("--out", folder / f"{name}.csv", [*head, *(row.values() for row in rows)])
        yield folder / f"{name}.csv"
    if not _has_lists(result):
        write_suspects(folder / "suspects.csv", suspects_of(result))
        yield folder / "suspects.csv"


class Suspect(NamedTuple):
    """An image that may have a wrong label."""

    loss: float
    result: "DataSetResult"
    prefix: str
    """The weights that give the loss, as a key of `result.predictions`."""
    sample: int


def suspects_of(result: "DataSetResult") -> list[Suspect]:
    """The images that may have a wrong label, the highest loss first."""
    from trainyard.training.predictions import suspects

    columns = result.predictions[prefix := _best(result)]
    return [Suspect(float(columns.loss[n]), result, prefix, n) for n in suspects(columns)]


def write_suspects(path: Path, suspects: Iterable[Suspect]) -> None:
    """Write a line for each image."""
    lines = (
        (*next(_lines(result, prefix, [sample])), f"{loss:.4f}")
        for loss, result, prefix, sample in suspects
    )
    write_csv("--out", path, [(*_COLUMNS, "loss"), *lines])


def write_predictions(path: Path, result: "DataSetResult") -> None:
    """Write the prediction for each readable image; place is the rank of the true class.

    Lists of labels, and of classes with a probability above 0.5, are separated by "|".
    """
    lines = (line for prefix in result.predictions for line in _lines(result, prefix))
    write_csv("--out", path, [_LIST_COLUMNS if _has_lists(result) else _COLUMNS, *lines])


def _lines(
    result: "DataSetResult", prefix: str, samples: Iterable[int] | None = None
) -> Iterator[tuple[object, ...]]:
    """A line for each of the samples, or of all that could be read."""
    index, columns = result.data.index, result.predictions[prefix]
    losses = columns.losses(result.labels) if _has_lists(result) else None
    for sample in columns.is_read().nonzero()[0].tolist() if samples is None else samples:
        file, offset, _ = index.locate(sample)
        origin = (result.data.where, label_of(prefix), sample, file, offset)
        if losses is not None:
            likely = (columns.logits[:, sample] > 0).nonzero()[0].tolist()
            guesses = "|".join(result.classes[n] for n in likely)
            yield *origin, "|".join(index.class_names(sample)), guesses, f"{losses[sample]:.6f}"
            continue
        guess = int(columns.guess[sample])
        yield (
            *origin,
            result.classes[int(index.label[sample])],
            result.classes[guess] if guess >= 0 else "",
            f"{columns.confidence[sample]:.6f}",
            int(columns.rank_of_truth[sample]) if guess >= 0 else "",
        )
