"""`trainyard predict`: predicts the classes of images."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.arguments import Parser, fraction, positive
from trainyard.cli.options import (
    SECTIONS,
    add_ema,
    add_json,
    add_others,
    add_outs,
    add_target,
    add_views,
    check_overrides,
    check_suffix,
    check_target,
    is_export,
    loading,
    others_of,
    outs,
)
from trainyard.cli.printing import empty_table, naming, print_text, result_console, write_csv
from trainyard.data.storage.source import is_remote
from trainyard.errors import InputError
from trainyard.files import atomic_write
from trainyard.printable import print_line, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from trainyard.classifier import Classifier, Guess, Guesses
    from trainyard.data.index.unlabelled import Images

_SHOWN = 10  # unreadable images listed with a reason
_IN_FULL = 3  # up to so many images are shown with all guesses
_ONE_BY_ONE = 500  # up to so many images get a line each; for more, classes are counted
_BAR = 20  # characters
_UNKNOWN = "unknown"
_LONGEST = 200  # bytes of an image's name in the name of its map; a file system has 255
_SIMILAR = 0.99  # the lowest cosine of images that look alike


class Row(NamedTuple):
    """An image with its predictions."""

    name: str
    location: dict[str, Any]
    """Its name, or its path and offset in a data set."""
    error: str | None
    guesses: "list[Guess]"
    """The likeliest first; none with an error."""
    answer: str
    """The likeliest class, or "unknown"; "" with an error."""

    @property
    def path(self) -> str:
        """The absolute path of its file, or its URL."""
        file = str(self.location["image"])
        return file if is_remote(file) else os.path.abspath(file)


class Predictions(NamedTuple):
    """Images with their predictions, in the order of the command line."""

    classifier: "Classifier"
    parts: "list[tuple[Images, Guesses]]"
    options: argparse.Namespace

    def rows(self) -> Iterator[Row]:
        for images, guesses in self.parts:
            for number in range(len(images.index)):
                location: dict[str, Any] = {}
                if images.names is not None:
                    location["image"] = images.names[number]
                else:
                    location["image"], location["offset"], _ = images.index.locate(number)
                error, pair = guesses.bad.get(number), (guesses.classes, guesses.probabilities)
                named = [] if error else self.classifier.named(*(of[number] for of in pair))
                answer = self._answer(named) if named else ""
                yield Row(images.name(number), location, error, named, answer)

    def _answer(self, guesses: "list[Guess]") -> str:
        least = self.options.unknown_below
        is_known = least is None or guesses[0].probability >= least
        return guesses[0].name if is_known else _UNKNOWN

    def bad(self) -> list[tuple[str, str]]:
        """Names of images without a prediction, with the reasons."""
        return [
            (images.name(number), reason)
            for images, guesses in self.parts
            for number, reason in guesses.bad.items()
        ]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard predict` to its parser."""
    add_target(parser, ", or an exported file")
    add = parser.add_argument
    add(
        "images",
        metavar="IMAGE",
        nargs="*",
        help="an image file, a folder of them at any depth, a glob, the http(s) URL of an image, "
        "or a data set: tars, WebDataset, TFRecord, HDF5, packed files",
    )
    add = parser.add_argument_group("what to read").add_argument
    add(
        "--model",
        metavar="NAME",
        help="a model of timm with its published weights, in place of RUN_OR_CHECKPOINT",
    )
    add("--checkpoint", metavar="FILE", help="with --model: a file of weights, instead of timm's")
    how = parser.add_argument_group("how to predict")
    add_others(how)
    add_ema(how)
    add_views(how)
    how.add_argument(
        "--unknown-below",
        metavar="P",
        type=fraction,
        help="call an image unknown if its likeliest class has a probability below P, such as 0.5",
    )
    _add_output(parser.add_argument_group("what to print and to write"))
    parser.epilog = (
        "Recipe keys of the sections model, data and batch can be given as --SECTION.KEY VALUE, "
        "for example --data.eval_size 288. Unreadable images are listed and skipped; the exit "
        "code is 2 if no image can be read."
    )
    parser.set_defaults(run_command=predict, takes_overrides=SECTIONS)


def _add_output(group: Parser) -> None:
    add = group.add_argument
    add(
        "--top",
        metavar="K",
        type=positive,
        default=5,
        help="number of classes per image; default: 5",
    )
    add_json(group)
    add_outs(
        group,
        "FILE.csv: write a line per image; FILE.npz: write what the classifier layer gets, "
        "float32[images, D], and the images' paths; FOLDER: write each image, red where the model "
        "finds its likeliest class (Grad-CAM), as PNG",
    )
    add(
        "--duplicates",
        metavar="FILE.csv",
        help="write the pairs of images that look alike, by the cosine of their embeddings",
    )
    add(
        "--similar",
        metavar="COSINE",
        type=fraction,
        help=f"the lowest cosine of such a pair; default: {_SIMILAR}",
    )


def predict(options: argparse.Namespace) -> int:
    """Run `trainyard predict`. Returns the exit code."""
    if options.model is None:  # else load_published() checks them
        check_overrides(options.overrides, "a prediction")
    _check_files(options)
    _check_source(options)
    from rich.console import Console

    from trainyard.data.index.unlabelled import open_images
    from trainyard.data.open_datasets import warn
    from trainyard.monitor.progress import counter

    console = Console(stderr=True)
    with TemporaryDirectory(prefix="trainyard-predict-") as folder:
        with counter(console, "looking for images") as show:
            found = open_images(options.images, Path(folder), show)
        accounts = [images.index.left_out for images in found if images.index.left_out]
        warn(console, [printable(f"left out: {left_out}") for left_out in accounts])
        classifier, remarks = _loaded(options)  # after a look at the images, which is shorter
        warn(console, [printable(remark) for remark in remarks])
        _check_one_model(classifier, options)
        _check_unknown(classifier, options)
        predictions = _predicted(classifier, found, options, console)
        for path in outs(options, ""):
            _write_overlays(path, predictions)
    bad, total = predictions.bad(), sum(len(images.index) for images in found)
    if len(bad) == total:
        name, reason = bad[0]
        if total == 1:
            raise InputError("image.unreadable", name=name, reason=reason)
        raise InputError(
            "image.none-readable",
            "{name}: {reason}; of {num_images:,} images none can be read",
            name=name,
            reason=reason,
            num_images=total,
        )
    _write(predictions)
    if options.json:
        print(_as_json(predictions))
    else:
        _print(predictions, total - len(bad))
    for name, reason in bad[:_SHOWN]:
        print_line(f"{name}: {reason}")
    if len(bad) > 1:
        print_line(f"{len(bad):,} of {total:,} images cannot be read")
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """InputError for the wrong suffix of a file to write, or --similar without its file."""
    for path in options.out:
        check_suffix(path, "--out", ".csv", ".npz", "")
    check_suffix(options.duplicates, "--duplicates", ".csv")
    if options.similar is not None and not options.duplicates:
        raise InputError(
            "option.similar-without-duplicates", "--similar is for --duplicates, which is not given"
        )


def _check_source(options: argparse.Namespace) -> None:
    """InputError unless there are images, and a run or --model. All are images beside --model."""
    if options.model is not None:
        from trainyard.model.catalogue import check_name

        check_name(options.model)
        options.images = [options.target, *options.images]
        if options.ema is not None or options.others:
            raise InputError(
                "option.ema-without-run",
                "--ema, --ema-decay and --with are for runs; --model has one set of weights",
            )
        return
    if options.checkpoint is not None:
        raise InputError(
            "option.checkpoint-without-model",
            "--checkpoint FILE is for --model NAME; a run's checkpoint is named alone: trainyard "
            "predict RUN_OR_CHECKPOINT IMAGE",
        )
    if not is_export(options):
        check_target(options, options.images)
        others_of(options)
    if not options.images:
        raise InputError(
            "option.missing-image",
            "name an IMAGE; see {command} --help",
            command=options.parser.prog,
        )


def _check_one_model(classifier: "Classifier", options: argparse.Namespace) -> None:
    paths = [*outs(options, ".npz"), *outs(options, ""), options.duplicates]
    for path in filter(None, paths if classifier.is_vote else []):
        raise InputError(
            "option.of-one-model",
            "{path}: embeddings and maps are those of one model, and this is {note}",
            path=path,
            note=classifier.note,
        )


def _check_unknown(classifier: "Classifier", options: argparse.Namespace) -> None:
    if options.unknown_below is not None and classifier.has_lists:
        raise InputError(
            "option.unknown-below-beside-lists",
            "--unknown-below: is for images of one class each; this model gives each class a "
            "probability of its own",
        )
    if options.unknown_below is not None and _UNKNOWN in classifier.classes:
        raise InputError(
            "option.unknown-is-a-class",
            "--unknown-below: the model has a class named unknown already",
        )


def _loaded(options: argparse.Namespace) -> "tuple[Classifier, list[str]]":
    """The classifier, and remarks about published weights."""
    with loading():
        from trainyard.classifier import load
        from trainyard.published import load_published
        from trainyard.world import World, pick_device
    pick_device(World())  # for its threads
    if options.model is None and is_export(options):
        from trainyard.export.load import load_export

        return load_export(options.target), []
    if options.model is None:
        others = [path for _, path in others_of(options)]
        runs = [options.target, *others]
        loaded = load(runs, ema=options.ema, overrides=options.overrides)
        return loaded, [loaded.note] if others else []
    return load_published(options.model, options.checkpoint, overrides=options.overrides)


def _predicted(
    classifier: "Classifier",
    found: "Sequence[Images]",
    options: argparse.Namespace,
    console: "Console",
) -> Predictions:
    from trainyard.monitor.progress import counter

    parts = []
    before, total = 0, sum(len(images.index) for images in found)
    with counter(console, "predicting", total) as show:
        for images in found:
            on_batch = partial(lambda before, started: show(before + started), before)
            guesses = classifier.predict_index(
                images.index,
                options.top,
                flip=options.flip,
                scales=options.scales,
                embed=bool(outs(options, ".npz") or options.duplicates),
                on_batch=on_batch,
            )
            guesses.bad.update(images.missing)
            parts.append((images, guesses))
            before += len(images.index)
    return Predictions(classifier, parts, options)


def _as_json(predictions: Predictions) -> str:
    """All predictions as one JSON document."""
    images = []
    for row in predictions.rows():
        guesses = [{"class": name, "probability": share} for name, share in row.guesses]
        entry = {"error": row.error} if row.error else {"class": row.answer, "guesses": guesses}
        if predictions.classifier.has_lists:
            entry.pop("class", None)
        images.append(row.location | entry)
    classifier = predictions.classifier
    tree = {
        "checkpoint": classifier.source,
        "step": classifier.step,
        "weights": classifier.weights or "raw",
        "temperature": classifier.temperature,
        "images": images,
    }
    return json.dumps(tree)


def _write(predictions: Predictions) -> None:
    """Write the files that are wanted. InputError if one cannot be written."""
    options = predictions.options
    for path in outs(options, ".csv"):
        _write_csv(path, predictions)
    archives = outs(options, ".npz")
    if not (archives or options.duplicates):
        return
    import numpy as np

    rows = [row for row in predictions.rows() if not row.error]
    parts = [
        guesses.vectors[[n for n in range(len(guesses.vectors)) if n not in guesses.bad]]
        for _, guesses in predictions.parts
        if guesses.vectors is not None
    ]
    vectors = np.concatenate(parts)
    for path in archives:
        columns = {
            "vectors": vectors,
            "paths": np.array([row.path for row in rows]),
            "offsets": np.array([row.location.get("offset", 0) for row in rows], np.int64),
            "classes": np.array([row.answer for row in rows]),
        }
        with naming("--out", path), atomic_write(path) as file:
            np.savez(file, **columns)  # type: ignore[arg-type]  # allow_pickle is no array
    if options.duplicates:
        from trainyard.datasets.near_duplicates import MOST, near_duplicates

        least = _SIMILAR if options.similar is None else options.similar
        pairs = near_duplicates(vectors, least)
        lines: list[tuple[object, ...]] = [
            (f"{cosine:.6f}", *(cell for n in pair for cell in _origin(rows[n])))
            for pair, cosine in zip(pairs.numbers.tolist(), pairs.cosines.tolist(), strict=True)
        ]
        head = ("cosine", "path_1", "offset_1", "class_1", "path_2", "offset_2", "class_2")
        write_csv("--duplicates", Path(options.duplicates), [head, *lines])
        if not options.json:
            remark = " or more, of which these are the most alike" if len(lines) == MOST else ""
            print_text(f"{len(lines):,} pairs of images look alike{remark}: {options.duplicates}")


def _write_overlays(folder: Path, predictions: Predictions) -> None:
    """Write 00000-NAME.png for the first image, and so on. InputError if that fails."""
    from trainyard.data.reading.reader import Reader

    count = 0
    for images, guesses in predictions.parts:
        reader = Reader(images.index)
        for number in range(len(images.index)):
            if number not in guesses.bad:
                label = int(guesses.classes[number, 0])  # of all views
                image = predictions.classifier.overlay(bytes(reader.read(number)), label)
                stem = Path(images.name(number).partition("?")[0]).stem
                if len(os.fsencode(stem)) > _LONGEST:  # the number tells it apart
                    stem = os.fsencode(stem)[:_LONGEST].decode(errors="ignore")
                with naming("--out", folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    image.save(folder / f"{count:05}-{stem}.png")
            count += 1


def _origin(row: Row) -> tuple[str, object, str]:
    return row.path, row.location.get("offset", ""), row.answer


def _write_csv(path: Path, predictions: Predictions) -> None:
    """Write a line per image: its name and path, its classes with probabilities, or its error.

    InputError if the file cannot be written.
    """
    top = max(guesses.classes.shape[1] for _, guesses in predictions.parts)
    columns = [f"{key}_{rank + 1}" for rank in range(top) for key in ("class", "probability")]
    lines = [["image", "path", "offset", "error", "class", *columns]]
    for row in predictions.rows():
        cells = [cell for name, share in row.guesses for cell in (name, f"{share:.6f}")]
        origin = (row.name, row.path, str(row.location.get("offset", "")), row.error or "")
        answer = "" if predictions.classifier.has_lists else row.answer
        lines.append([*origin, answer, *(cells or [""] * len(columns))])
    write_csv("--out", path, lines)


# --- on a terminal ---


def _print(predictions: Predictions, count: int) -> None:
    """Print all guesses of a few images, the top one of more, or counts of classes for many.

    `count`: readable images.
    """
    console, written = result_console(), predictions.options.out
    if count <= _ONE_BY_ONE:
        rows = [row for row in predictions.rows() if not row.error]
        for row in rows if count <= _IN_FULL else ():
            title = f"{row.name}: {_UNKNOWN}" if row.answer == _UNKNOWN else row.name
            console.print(title, style="bold", soft_wrap=True)
            console.print(_in_full(row))
        if count > _IN_FULL:
            console.print(_one_by_one(rows))
    else:
        console.print(_counted(predictions, count))
        if not written:
            console.print("--out FILE.csv and --json list each image", soft_wrap=True)
    print_text(*(f"written: {path}" for path in written))


def _in_full(row: Row) -> "Table":
    table = empty_table("class", ">probability", "")
    for name, share in row.guesses:
        table.add_row(name, f"{share:.1%}", "█" * round(_BAR * share))
    return table


def _one_by_one(rows: Sequence[Row]) -> "Table":
    table = empty_table("image", "class", ">probability", "else")
    for row in rows:
        others = row.guesses[int(row.answer == row.guesses[0].name) :]
        rest = ", ".join(f"{name} {share:.1%}" for name, share in others[:2])
        table.add_row(row.name, row.answer, f"{row.guesses[0].probability:.1%}", rest)
    return table


def _counted(predictions: Predictions, images: int) -> "Table":
    """The number of images of each class, of so many `images` in all."""
    import numpy as np

    counts = np.sum([guesses.counts for _, guesses in predictions.parts], axis=0)
    names = predictions.classifier.classes
    counted = dict(zip(names, counts.tolist(), strict=True))
    if predictions.options.unknown_below is not None:
        counted = Counter(row.answer for row in predictions.rows() if not row.error)
    table = empty_table("class", ">images", ">share")
    for name, count in sorted(counted.items(), key=lambda each: -each[1]):
        if count:
            table.add_row(name, f"{count:,}", f"{count / images:.1%}")
    return table
