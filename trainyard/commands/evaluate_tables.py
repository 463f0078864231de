"""Results of an evaluation as tables, as JSON, and as a file with a line per image."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from trainyard.commands.printing import print_text, result_console, write_csv
from trainyard.data.index.table import Index
from trainyard.files import finite
from trainyard.run.evaluation import DataSetResult
from trainyard.training.averages import label_of
from trainyard.training.label_scores import LabelScores
from trainyard.training.predictions import Predictions, confusions, per_class

_SHARES = {
    "top1": "top-1",
    "top5": "top-5",
    "balanced_accuracy": "balanced",
    "map": "mAP",
    "micro_f1": "micro\nF1",
    "macro_f1": "macro\nF1",
}
_WIDTH = 80  # characters; lines wrap in a narrower terminal, so that no column is lost


def as_json(result: DataSetResult, worst: int | None, wrong: int | None) -> dict[str, Any]:
    """A result with the `worst` worst classes and `wrong` confusions; None leaves them out."""
    tree = result.as_dict()
    for prefix, said in result.predictions.items():
        if worst is not None:
            tree[f"{prefix}per_class"] = _classes(result, said, worst)
        if wrong is not None and isinstance(said, Predictions):
            tree[f"{prefix}confusions"] = _confusions(result, said, wrong)
    return {key: finite(value) for key, value in tree.items()}


def _classes(
    result: DataSetResult, said: Predictions | LabelScores, count: int
) -> list[dict[str, Any]]:
    if isinstance(said, LabelScores):
        rows = [row for row in said.per_class(result.labels) if row.samples]
        return [
            {
                "class": result.classes[row.label],
                "samples": row.samples,
                "average_precision": row.average_precision,
                "f1": row.f1,
            }
            for row in rows[:count]
        ]
    return [
        {
            "class": result.classes[row.label],
            "samples": row.samples,
            "top1": row.top1,
            "top5": row.top5,
        }
        for row in per_class(said, result.labels)[:count]
    ]


def _confusions(result: DataSetResult, said: Predictions, count: int) -> list[dict[str, Any]]:
    names = result.classes
    return [
        {"class": names[row.label], "guess": names[row.guess], "samples": row.samples}
        for row in confusions(said, result.labels, count)
    ]


# --- on a terminal ---


def print_results(results: list[DataSetResult], worst: int | None, wrong: int | None) -> None:
    """Print a table with one row per data set and weights, and notes on its numbers.

    Then the `worst` worst classes and the `wrong` most frequent confusions of each data set, by
    its weights with the higher top-1, or mAP; None leaves them out. Images with lists of labels
    have no confusions.
    """
    console = result_console()
    console.width = max(console.width, _WIDTH)
    trees = [result.as_dict() for result in results]
    prefixes = list(results[0].predictions)
    console.print(_overview(trees, prefixes))
    for note in _notes(trees, prefixes):
        print_text(note)
    for result, tree in zip(results, trees, strict=True):
        prefix = max(result.predictions, key=lambda prefix: float(tree[f"{prefix}{_main(tree)}"]))
        of = f"{result.data.where}, {label_of(prefix)} weights"
        said = result.predictions[prefix]
        if worst is not None:
            rows = _classes(result, said, worst)
            title = f"\nThe {len(rows)} worst of {len(result.classes):,} classes ({of})"
            print_text(title)
            console.print(_class_table(rows))
        if wrong is not None and isinstance(said, Predictions):
            console.print(
                f"\nThe most frequent wrong guesses ({of})", soft_wrap=not console.is_terminal
            )
            console.print(_confusion_table(_confusions(result, said, wrong)))


def _table(texts: list[str], numbers: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _main(tree: dict[str, Any]) -> str:
    """The key of the first value of a result."""
    return "map" if "map" in tree else "top1"


def _overview(trees: list[dict[str, Any]], prefixes: list[str]) -> Table:
    is_new = any("reassessed" in tree for tree in trees)
    shares = [key for key in _SHARES if key in trees[0]]
    rest = {key: name for key, name in (("loss", "loss"), ("ece", "ECE")) if key in trees[0]}
    numbers = ["samples", *(_SHARES[key] for key in shares), *rest.values()]
    table = _table(["data"], numbers + (["new top-1"] if is_new else []))
    for tree in trees:
        for number, prefix in enumerate(prefixes):
            row = [
                f"{tree['samples']:,}",
                *(f"{tree[prefix + key]:.2%}" for key in shares),
                *(f"{tree[prefix + key]:.4f}" for key in rest),
            ]
            if "reassessed" in tree:
                row.append(f"{tree['reassessed'][prefix + 'top1']:.2%}")
            first = f"{tree['data']}, {label_of(prefix)}" if prefix else tree["data"]
            table.add_row(f"  {label_of(prefix)}" if number else first, *row)
    return table


def _notes(trees: list[dict[str, Any]], prefixes: list[str]) -> Iterator[str]:
    """Notes that are needed to compare the numbers with others."""
    if "ema_decay" in trees[0] and len(prefixes) > 1:
        yield f"the best average of the run's last evaluation: EMA {trees[0]['ema_decay']}"
    if trees[0]["flip"]:
        kind = "sigmoid" if "map" in trees[0] else "softmax"
        yield f"with test-time flip: the mean of the {kind} of each image and of its mirror image"
    if trees[0]["bn_samples"]:
        yield f"batch norm statistics of {trees[0]['bn_samples']:,} training images"
    for tree in trees:
        where = tree["data"]
        if tree["classes"] < tree["model_classes"]:
            of = f"{tree['classes']:,} of {tree['model_classes']:,} classes"
            yield f"{where}: guesses among its {of} alone"
        if tree["bad"]:
            images = "image" if tree["bad"] == 1 else "images"
            yield f"{where}: left out {tree['bad']:,} {images} that cannot be read"
        for prefix in prefixes:
            if count := tree[f"{prefix}not_finite"]:
                weights = label_of(prefix)
                yield f"{where}, {weights} weights: {count:,} images get scores that are not finite"
        if "reassessed" in tree:
            again = tree["reassessed"]
            yield f"{where}: new top-1 on the {again['samples']:,} images in {again['labels']}"


def _class_table(rows: list[dict[str, Any]]) -> Table:
    names = {"top1": "top-1", "top5": "top-5", "average_precision": "AP", "f1": "F1"}
    keys = [key for key in names if rows and key in rows[0]]
    table = _table(["class"], ["samples", *(names[key] for key in keys)])
    for row in rows:
        accuracies = (f"{row[key]:.1%}" for key in keys)
        table.add_row(row["class"], f"{row['samples']:,}", *accuracies)
    return table


def _confusion_table(rows: list[dict[str, Any]]) -> Table:
    table = _table(["class", "taken for"], ["samples"])
    for row in rows:
        table.add_row(row["class"], row["guess"], f"{row['samples']:,}")
    return table


# --- a line per image ---

_PLACE = ("data", "weights", "sample", "file", "offset")
_COLUMNS = (*_PLACE, "class", "guess", "confidence", "place")
_LIST_COLUMNS = (*_PLACE, "labels", "guesses", "loss")


def write_predictions(path: Path, results: list[DataSetResult]) -> None:
    """Write the prediction for each readable image; place is the rank of the true class.

    Lists of labels, and of classes with a probability above 0.5, are separated by "|".
    """
    has_lists = any(result.data.index.lists is not None for result in results)
    lines = (
        _lines(result, said, label_of(prefix))
        for result in results
        for prefix, said in result.predictions.items()
    )
    columns = _LIST_COLUMNS if has_lists else _COLUMNS
    write_csv("--predictions", path, [columns, *chain.from_iterable(lines)])


def _lines(
    result: DataSetResult, said: Predictions | LabelScores, weights: str
) -> Iterator[tuple[object, ...]]:
    index: Index = result.data.index
    losses = said.losses(result.labels) if isinstance(said, LabelScores) else None
    for sample in said.is_read().nonzero()[0].tolist():
        file, offset, _ = index.locate(sample)
        place = (result.data.where, weights, sample, file, offset)
        if isinstance(said, LabelScores):
            assert losses is not None
            likely = (said.logits[:, sample] > 0).nonzero()[0].tolist()
            guesses = "|".join(result.classes[n] for n in likely)
            yield *place, "|".join(index.class_names(sample)), guesses, f"{losses[sample]:.6f}"
            continue
        guess = int(said.guess[sample])
        yield (
            *place,
            result.classes[int(index.label[sample])],
            result.classes[guess] if guess >= 0 else "",
            f"{said.confidence[sample]:.6f}",
            int(said.place[sample]) if guess >= 0 else "",
        )
