"""Precision and recall of `trainyard suspects` beside cleanlab's, by the same probabilities.

python -m benchmarks.suspects FOLDER [--only SET ...] [--seeds 3] [--hardware NAME]

5% of the training labels are made wrong, by `data.corrections`: of the digits, and of the 10,000
test images of Fashion-MNIST (Debian's dataset-fashion-mnist), for a small network that trains for 8
epochs. Probabilities are those of a run for the images that it was
trained on, and those of the runs of five folds for images that they were not trained on. `pip
install cleanlab` gets its find_label_issues, which is used as it is by default. FOLDER is for data,
runs, and their rows in `suspects.jsonl`, to which further sets and seeds are added; --seeds 0
writes the table alone.
"""

import argparse
import csv
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.fashion_mnist import SOURCE
from benchmarks.saving import listed, save
from trainyard.classifier import load
from trainyard.command_line import main as trainyard
from trainyard.config import load_recipe
from trainyard.data.config import DataConfig
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import open_split, source_of
from trainyard.data.reading.reader import Reader
from trainyard.run.trainer import train
from trainyard.training.predictions import Predictions, suspects
from trainyard.world import World

WRONG, FOLDS, AT_ONCE = 0.05, 5, 1000
SETS: dict[str, list[str]] = {"digits": [], "fashion-mnist": [str(SOURCE)]}
KEYS: dict[str, dict[str, Any]] = {
    "digits": {},
    "fashion-mnist": {
        "model.name": "benchmarks.fashion_mnist:network",
        "model.options": {},
        "optim.lr": 0.1,
        "optim.lr_scale": [],
        "batch.size": 128,
        "batch.precision": "fp32",
        "run.length": "8 epochs",
        "run.eval_every": "8 epochs",
    },
}
Floats = NDArray[np.float32]


def locations(folder: Path, name: str) -> tuple[str, str]:
    """The training and validation data, prepared if need be."""
    data = folder / name
    if not data.exists():
        trainyard(["data", "prepare", name, *SETS[name], str(data)])
    if name == "digits":
        return str(data / "train"), str(data / "val")
    train, test = (str(data / f"{name}-{part}-000000.packed") for part in ("train", "val"))
    return test, train


def make_wrong(path: str, index: Index, seed: int) -> NDArray[np.bool_]:
    """A list with another class for 5% of the images; True for these: bool[samples]."""
    rng = np.random.default_rng(seed)
    is_wrong: NDArray[np.bool_] = rng.random(len(index)) < WRONG
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("file", "offset", "class"))
        for n in np.flatnonzero(is_wrong).tolist():
            other = (index.label[n] + rng.integers(1, len(index.classes))) % len(index.classes)
            rows.writerow((*index.locate(n)[:2], index.classes[other]))
    return is_wrong


def scores(run: Path, index: Index, samples: NDArray[np.int64]) -> Floats:
    """The probabilities of a run's best weights: float32[samples, classes]."""
    classifier, reader = load(run), Reader(index)
    parts = []
    for some in np.array_split(samples, max(1, len(samples) // AT_ONCE)):
        images = classifier.preprocess([bytes(reader.read(n)) for n in some.tolist()])
        parts.append(torch.softmax(classifier.logits(images), 1).numpy())
    return np.concatenate(parts)


def ours(shares: Floats, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The samples that `trainyard suspects` lists, in its order."""
    of_label = shares[np.arange(len(labels)), labels]
    rank = 1 + (shares > of_label[:, None]).sum(1)
    guess, sure = shares.argmax(1), shares.max(1)
    columns = (np.asarray(each, np.float32) for each in (rank, guess, sure, -np.log(of_label)))
    return np.array(suspects(Predictions(*columns)), np.int64)


def measured(folder: Path, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of probabilities and each tool."""
    place, val = locations(folder, name)
    clean = load_recipe(name, {"data.train": place, "data.val": val})
    index = opened(clean.data, "train")
    path = str(folder / f"{name}-{seed}.csv")
    is_wrong = make_wrong(path, index, seed)
    wrong = clean.data.model_copy(update={"corrections": path})
    labels = np.array(opened(wrong, "train").label, np.int64)
    keys = {"data.train": place, "data.corrections": path, "run.seed": seed} | KEYS[name]
    folds = [{"data.val_fold": f"{n + 1}/{FOLDS}"} for n in range(FOLDS)]
    for kind, parts in (("own run", [{"data.val": val}]), ("folds", folds)):
        shares = np.zeros((len(index), len(index.classes)), np.float32)
        for number, part in enumerate(parts):
            config = load_recipe(name, keys | part)
            run = folder / f"{name}-{seed}-{kind.replace(' ', '-')}-{number}"
            train(config, str(run), world=World(), console=Console(quiet=True))
            side = opened(config.data, "val").row if kind == "folds" else None
            rows = np.arange(len(index)) if side is None else np.array(side)
            shares[rows] = scores(run, index, rows)
        for tool, find in (("trainyard", ours), ("cleanlab", cleanlabs)):
            found = find(shares, labels)
            yield {
                "set": name,
                "seed": seed,
                "probabilities": kind,
                "tool": tool,
                "images": len(index),
                "wrong": int(is_wrong.sum()),
                "listed": len(found),
                "hits": int(is_wrong[found].sum()),
                "first": int(is_wrong[found[: is_wrong.sum()]].sum()),
            }


def opened(data: DataConfig, split: Literal["train", "val"]) -> Index:
    return open_split(source_of(data, split), World(), lambda *_: None)


def cleanlabs(shares: Floats, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The samples that cleanlab lists, in its order."""
    from cleanlab.filter import find_label_issues

    ranked = find_label_issues(labels, shares, n_jobs=1, return_indices_ranked_by="self_confidence")
    return np.asarray(ranked, np.int64)


def table(rows: list[dict[str, Any]]) -> str:
    """Of all seeds together; the images listed are their mean.

    The last column: the share of the wrong labels among the first images, as many as are wrong.
    """
    lines = [
        "| set | seeds | probabilities of | list of | listed | precision | recall | found first |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((row["set"], row["probabilities"], row["tool"]) for row in rows)
    for kind in kinds:
        of = [row for row in rows if (row["set"], row["probabilities"], row["tool"]) == kind]
        found, hits, first, wrong = (
            sum(row[key] for row in of) for key in ("listed", "hits", "first", "wrong")
        )
        name, *rest = kind
        shares = (hits / max(found, 1), hits / wrong, first / wrong)
        cells = [name, f"{len(of)}", *rest, f"{found / len(of):,.0f}"]
        lines.append(f"| {' | '.join([*cells, *(f'{share:.1%}' for share in shares)])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-suspects.json and .md")
    options = parser.parse_args()
    log = options.folder / "suspects.jsonl"
    with open(log, "a") as file:
        for name in options.only:
            for seed in range(options.seeds):
                for row in measured(options.folder, name, seed):
                    print(json.dumps(row), file=file, flush=True)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    print(table(rows))
    if options.hardware:
        about = {"hardware": options.hardware, "torch": torch.__version__}
        about |= {"cleanlab": version("cleanlab")}
        text = f"# Wrong labels, 5% of the training images\n\n{listed(about)}\n\n{table(rows)}"
        save(f"{options.hardware}-suspects", about | {"runs": rows}, text)


if __name__ == "__main__":
    main()
