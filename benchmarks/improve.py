"""`trainyard improve` beside what else one could do when two classes come to eight.

python -m benchmarks.improve FOLDER [--only SET ...] [--seeds 3] [--hardware NAME]

The digits without 8 and 9, and 3,000 training images and 1,000 others of Fashion-MNIST (Debian's
dataset-fashion-mnist) without coats and shirts, which look like pullovers and T-shirts. The recipe
is `digits`, for 8 epochs. All start again with each seed: the old run, `improve` with shares of
the old images, and a run from scratch on all. FOLDER is for data, runs, and their rows in
`improve.jsonl`, to which further sets and seeds are added; --seeds 0 writes the table alone.
"""

import argparse
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.fashion_mnist import SOURCE
from benchmarks.saving import listed, save
from trainyard.datasets.prepare.digits import prepare_digits

NEW = {"digits": ("8", "9"), "fashion-mnist": ("4", "6")}
SHARES = (0.02, 0.25, 0.5, 1.0)
LENGTH = ("--run.length", "8 epochs", "--run.eval_every", "8 epochs", "--data.threads", "1")


def prepared(folder: Path, name: str) -> tuple[Path, Path]:
    """Folders of the old and of the new classes, made if need be."""
    whole, old, new = (folder / name / part for part in ("all", "old", "new"))
    if not whole.exists():
        whole.parent.mkdir(parents=True, exist_ok=True)
        prepare_digits(whole) if name == "digits" else prepare_fashion(whole)
    for part, is_new in ((old, False), (new, True)):
        for each in whole.glob("*/[0-9]") if not part.exists() else ():
            if (each.name in NEW[name]) == is_new:
                (part / each.parent.name).mkdir(parents=True, exist_ok=True)
                (part / each.parent.name / each.name).symlink_to(each.absolute())
    return old, new


def prepare_fashion(folder: Path) -> None:
    for split, stem, count in (("train", "train", 3000), ("val", "t10k", 1000)):
        images, labels = (
            np.frombuffer(gzip.decompress((SOURCE / f"{stem}-{kind}.gz").read_bytes()), np.uint8)
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        for number in range(count):
            path = folder / split / str(labels[8 + number]) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[16:].reshape(-1, 28, 28)[number]).save(path)


def told(*words: object) -> tuple[dict[str, Any], float]:
    """What a command prints with --json, and its seconds."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "trainyard", *map(str, words), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]), time.perf_counter() - start


def measured(folder: Path, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each way: top-1 of old and new classes, on validation images, and seconds."""
    old, new = prepared(folder, name)
    keys = ("--run.seed", seed, *LENGTH)
    runs = folder / name / f"runs-{seed}"
    row = {"set": name, "seed": seed}
    told("train", "digits", "--data", old, "--run", runs / "old", *keys)
    for share in SHARES:
        where = (new, "--rehearse", share, "--run", runs / f"improved-{share}")
        found, seconds = told("improve", runs / "old", *where, *keys)
        images, classes = found["old_images"], found["new_classes"]
        if share == SHARES[0]:
            yield row | {"way": "the old run", "old": images["before"], "new": 0.0, "seconds": 0.0}
        hits = sum(one["samples"] * one["top1"] for one in classes)
        of_new = hits / sum(one["samples"] for one in classes)
        way = f"improve, {share:.0%} of the old images"
        yield row | {"way": way, "old": images["after"], "new": of_new, "seconds": seconds}
    both = ("--data", old, "--data", new)
    _, seconds = told("train", "digits", *both, "--run", runs / "all", *keys)
    found, _ = told("evaluate", runs / "all", "--per-class", 10)
    shares = {}
    for part, is_new in (("old", False), ("new", True)):
        own = [one for one in found["per_class"] if (one["class"] in NEW[name]) == is_new]
        hits = sum(one["samples"] * one["recall"] for one in own)
        shares[part] = hits / sum(one["samples"] for one in own)
    yield row | {"way": "from scratch on all"} | shares | {"seconds": seconds}


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds, with their standard deviations; seconds with the start and evaluations."""
    lines = [
        "| set | seeds | way | old classes | new classes | s, beside other load |",
        "|---|---|---|---|---|---|",
    ]
    for name, way in dict.fromkeys((row["set"], row["way"]) for row in rows):
        of = [row for row in rows if (row["set"], row["way"]) == (name, way)]
        shares = [
            f"{fmean(row[part] for row in of):.1%} ± "
            f"{100 * stdev(row[part] for row in of) if len(of) > 1 else 0:.1f}"
            for part in ("old", "new")
        ]
        seconds = fmean(row["seconds"] for row in of)
        lines.append(f"| {name} | {len(of)} | {way} | {' | '.join(shares)} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=NEW, default=list(NEW))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-improve.json and .md")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    log = options.folder / "improve.jsonl"
    with open(log, "a") as file:
        for seed in range(options.seeds):
            for name in options.only:
                for row in measured(options.folder, name, seed):
                    print(json.dumps(row), file=file, flush=True)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    print(table(rows))
    if options.hardware:
        about = {"hardware": options.hardware, "torch": torch.__version__}
        text = f"# Two new classes beside eight\n\n{listed(about)}\n\n{table(rows)}"
        save(f"{options.hardware}-improve", about | {"runs": rows}, text)


if __name__ == "__main__":
    main()
