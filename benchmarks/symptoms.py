"""Runs that learn nothing, or seem to learn too well: how each fault looks in loss and accuracy.

python -m benchmarks.symptoms FOLDER [--hardware NAME] [--out benchmarks/results]

FOLDER is for the data and the runs: scikit-learn's digits, 200 images of Fashion-MNIST (Debian's
package dataset-fashion-mnist), and lists of them with one fault each. Every row but the first is
the `digits` recipe with that fault and nothing else changed. The table has the last evaluation, the
training reports since the one before, and what `trainyard report` says. Five minutes on two cores;
runs that are complete in FOLDER are not made again.
"""

import argparse
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trainyard
from benchmarks.balance import write_images
from benchmarks.saving import RESULTS, save
from trainyard.datasets.prepare.digits import prepare_digits
from trainyard.errors import DivergedError
from trainyard.report.findings import findings, training_before
from trainyard.report.runs import read_runs

Keys = dict[str, Any]
Row = tuple[str, str, str]  # path, label, split
FASHION = Path("/usr/share/datasets/fashion-mnist")
DIGITS, SHUFFLED, HALF, FEW, LEAKED = "digits", "shuffled", "half-wrong", "few", "leaked"
VIT: Keys = {"model.name": "test_vit"}
SGD: Keys = {"optim.name": "sgd", "optim.momentum": 0.9}
HIGHER: Keys = {"optim.lr": 1e4, "schedule.warmup": "0 steps"}
IN_255: Keys = {"data.mean": [79.0] * 3, "data.std": [97.0] * 3}
FORTY: Keys = {"run.length": "40 epochs", "run.eval_every": "10 epochs"}
PLAIN: Keys = {"augment.scale": [1.0, 1.0], "augment.ratio": [1.0, 1.0]}
FAULTS: dict[str, tuple[str, Keys]] = {
    "none": (DIGITS, {}),
    "none, ViT": (DIGITS, VIT),
    "rate too high, ViT": (DIGITS, VIT | {"optim.lr": 1.0}),
    "rate too high, SGD": (DIGITS, SGD | {"optim.lr": 10.0}),
    "rate far too high, no warm-up": (DIGITS, SGD | HIGHER),
    "rate too low": (DIGITS, {"optim.lr": 1e-7}),
    "labels shuffled": (SHUFFLED, PLAIN),
    "half of the labels wrong": (HALF, PLAIN),
    "batch norm over 2 images": (DIGITS, {"batch.micro": 2}),
    "mean and std in 0..255": (DIGITS, IN_255),
    "mean and std in 0..255, ViT": (DIGITS, VIT | IN_255),
    "augmentation too strong": (DIGITS, {"augment.scale": [0.01, 0.05]}),
    "few images": (FEW, PLAIN | FORTY),
    "few images, leaked": (LEAKED, PLAIN | FORTY),
}
STATISTICS: dict[str, Keys] = {
    "those of training": {},
    "0 and 1": {"data.mean": [0.0] * 3, "data.std": [1.0] * 3},
    "ImageNet's": {"data.mean": [0.485, 0.456, 0.406], "data.std": [0.229, 0.224, 0.225]},
    "in 0..255": IN_255,
}


def write_lists(folder: Path) -> None:
    """The images, and lists of them as FOLDER/NAME.csv."""
    prepare_digits(folder / "digits")
    rows = [
        (str(path.relative_to(folder)), path.parent.name, path.parts[-3])
        for path in sorted((folder / "digits").glob("*/*/*.png"))
    ]
    write(folder / f"{DIGITS}.csv", rows)
    write(folder / f"{SHUFFLED}.csv", relabelled(rows, every=1))
    write(folder / f"{HALF}.csv", relabelled(rows, every=2))
    listed = write_images(FASHION, folder).read_text().splitlines()[1:]
    fashion = [tuple(line.split(",")) for line in listed]
    train, val = (
        [row for c in "0123456789" for row in [r for r in fashion if r[1:] == (c, split)][:20]]
        for split in ("train", "val")
    )
    write(folder / f"{FEW}.csv", train + val)
    (folder / "copies").mkdir(exist_ok=True)
    copies = [(f"copies/{Path(path).name}", label, "val") for path, label, _ in train]
    for (path, *_), (copy, *_) in zip(train, copies, strict=True):
        shutil.copy(folder / path, folder / copy)
    write(folder / f"{LEAKED}.csv", train + copies)


def relabelled(rows: Sequence[Row], *, every: int) -> list[Row]:
    """The labels of each N-th training image handed out among them at random."""
    places = [n for n, row in enumerate(rows) if row[2] == "train"][::every]
    labels = [rows[n][1] for n in places]
    random.Random(0).shuffle(labels)
    changed = dict(zip(places, labels, strict=True))
    return [(path, changed.get(n, label), split) for n, (path, label, split) in enumerate(rows)]


def write(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("path,label,split\n" + "".join(f"{','.join(row)}\n" for row in rows))


def run_one(folder: Path, fault: str) -> Keys:
    """Last losses and accuracies of one run, and what its report says."""
    data, keys = FAULTS[fault]
    keys = {"run.length": "8 epochs", "run.eval_every": "1 epoch"} | keys
    run = folder / "runs" / fault.replace(" ", "-").replace(",", "")
    try:
        trainyard.train("digits", run=run, data=folder / f"{data}.csv", overrides=keys)
    except DivergedError as error:
        print(error)
    read = read_runs([run])[0]
    last = read.history.val[-1]
    loss, top1 = training_before(read, last) or (None, 0.0)
    figures = {"train_top1": top1, "val_top1": last["top1"], "report": " ".join(findings(read))}
    return {"train_loss": loss, "val_loss": last["loss"], **figures}


def table(found: dict[str, Keys]) -> str:
    head = "fault | training loss | validation loss | training top-1 | validation top-1 | report"
    lines = [f"| {head} |", "|---|---|---|---|---|---|"]
    for fault, row in found.items():
        losses = f"{figure(row['train_loss'])} | {figure(row['val_loss'])}"
        accuracies = f"{row['train_top1']:.1%} | {row['val_top1']:.1%}"
        lines.append(f"| {fault} | {losses} | {accuracies} | {row['report']} |")
    return "\n".join(lines) + "\n"


def figure(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.2f}" if loss < 1000 else f"{loss:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hardware", default="2-core-vm")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_lists(options.folder)
    found = {fault: run_one(options.folder, fault) for fault in FAULTS}
    text = f"# Symptoms, {options.hardware}\n\n{table(found)}"
    text += "\nThe run without a fault, evaluated with another mean and std:\n\n"
    text += "| data.mean, data.std | top-1 | loss |\n|---|---|---|\n"
    for name, keys in STATISTICS.items():
        result = trainyard.evaluate(options.folder / "runs" / "none", overrides=keys)
        found[f"evaluated: {name}"] = {key: result[key] for key in ("top1", "loss")}
        text += f"| {name} | {result['top1']:.1%} | {result['loss']:.2f} |\n"
    save(f"{options.hardware}-symptoms", found, text, folder=options.out)
    print(text)


if __name__ == "__main__":
    main()
