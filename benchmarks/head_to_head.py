"""Whole runs of four programs: the same model, images, recipe, epochs and seeds.

trainyard data prepare fashion-mnist /usr/share/datasets/fashion-mnist FOLDER/packed
trainyard data pack FOLDER/packed FOLDER/fashion-mnist --format folder
python -m benchmarks.head_to_head FOLDER --timm CHECKOUT --vision CHECKOUT
    [--problems small computing] [--only NAME ...] [--seeds 0 1 2 3 4] [--untimed]
    [--hardware NAME]

Contenders: Trainyard; timm's train.py and torchvision's references/classification/train.py, out of
checkouts of their repositories; and benchmarks/head/bare.py, a loop as it is usually written. A
run is a process with two workers or loader threads, in fp32, from its start to its exit, with an
evaluation and a checkpoint in every epoch. Every program takes what torchvision's reference has
built in: random crops of 8 to 100% of the area, flips, ImageNet's mean and deviation; SGD with
momentum and a cosine by epoch; no decay of biases and norms.

Problems, of Fashion-MNIST, PNGs of 28 x 28 pixels: `small`, where reading and decoding bind, has
every 4th training and every 2nd test image and test_resnet; `computing` every 60th and 20th at 64
pixels, and ResNet-18. Batches divide the epochs, so no program drops images. Trainyard's first run
of a problem also makes the index of its images.

Finished runs stand in FOLDER/runs.jsonl and are not run again; --untimed marks runs beside which
other work ran, whose accuracy alone counts. `channels last` gives timm an option that Trainyard's
recipe has by default. Lines: what a user writes. They count a recipe's or script's lines and an
option of a command as one each.
"""

import argparse
import csv
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fashion_mnist import select
from benchmarks.saving import save

ROOT = Path(__file__).parents[1]
BARE = Path(__file__).with_name("head") / "bare.py"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DECAY = 5e-4


class Problem(NamedTuple):
    model: str
    size: int
    batch: int
    epochs: int
    lr: float
    every: dict[str, int]  # of the training and test images, every n-th


PROBLEMS = {
    "small": Problem("test_resnet", 28, 250, 4, 0.2, {"train": 4, "val": 2}),
    "computing": Problem("resnet18", 64, 25, 4, 0.02, {"train": 60, "val": 20}),
}

Words = list[str]
Run = dict[str, Any]


# --- the data ---


def prepare(folder: Path) -> None:
    """A folder for each problem, of links to its images."""
    source = folder / "fashion-mnist"
    if not (source / "train").is_dir():
        raise SystemExit(
            f"{source}/train is missing: run the first two lines above, with the files of Debian's "
            "package dataset-fashion-mnist"
        )
    for problem, of in PROBLEMS.items():
        for split, every in of.every.items() if not (folder / problem).exists() else ():
            paths = sorted((source / split).glob("*/*.png"), key=lambda path: path.name)
            for path in paths[::every]:
                place = folder / problem / split / path.parent.name / path.name
                place.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, place)


# --- the contenders: what a user writes, and the accuracy found ---


def recipe(of: Problem, data: Path) -> str:
    return f"""[model]
name = "{of.model}"

[data]
train = "{data}/train"
val = "{data}/val"
image_size = {of.size}
crop_pct = 1.0

[optim]
name = "sgd"
lr = {of.lr}
momentum = 0.9
weight_decay = {DECAY}

[schedule]
name = "cosine"
per = "epoch"

[batch]
size = {of.batch}

[run]
length = "{of.epochs} epochs"
save_every = "1 epochs"
"""


def trainyard(of: Problem, data: Path, place: Path, options: argparse.Namespace) -> Words:
    (place / "recipe.toml").write_text(recipe(of, data))
    return ["trainyard", "train", "recipe.toml", "--run", "run"]


def trainyard_top1(place: Path) -> float:
    lines = map(json.loads, (place / "run" / "metrics.jsonl").read_text().splitlines())
    return float([line["top1"] for line in lines if line["kind"] == "val"][-1])


def timm_train(of: Problem, data: Path, place: Path, options: argparse.Namespace) -> Words:
    return [
        str(options.timm / "train.py"),
        *(f"--data-dir={data}", "--val-split=val", f"--model={of.model}", "--num-classes=10"),
        *(f"--img-size={of.size}", "--crop-pct=1.0", "--interpolation=bilinear"),
        *("--train-interpolation=bilinear", "--color-jitter=0", "--smoothing=0"),
        *("--mean", *map(str, MEAN), "--std", *map(str, STD)),
        *("--opt=momentum", f"--lr={of.lr}", f"--weight-decay={DECAY}"),
        *(f"--epochs={of.epochs}", "--warmup-epochs=0", f"--batch-size={of.batch}"),
        *("--device=cpu", "--no-prefetcher", "--workers=2", "--experiment=run"),
    ]


def timm_channels_last(*arguments: Any) -> Words:
    return [*timm_train(*arguments), "--channels-last"]


def timm_top1(place: Path) -> float:
    with (place / "output" / "train" / "run" / "summary.csv").open() as file:
        return float(list(csv.DictReader(file))[-1]["eval_top1"]) / 100


def reference(of: Problem, data: Path, place: Path, options: argparse.Namespace) -> Words:
    return [
        str(options.vision / "references" / "classification" / "train.py"),
        *(f"--data-path={data}", f"--model={of.model}", "--device=cpu", "--workers=2"),
        *(f"--val-resize-size={of.size}", f"--val-crop-size={of.size}"),
        *(f"--train-crop-size={of.size}", f"--batch-size={of.batch}", f"--epochs={of.epochs}"),
        *(f"--lr={of.lr}", f"--weight-decay={DECAY}", "--norm-weight-decay=0"),
        *("--bias-weight-decay=0", "--lr-scheduler=cosineannealinglr"),
    ]


def reference_top1(place: Path) -> float:
    return float(re.findall(r"Test:\s+Acc@1 ([\d.]+)", (place / "log").read_text())[-1]) / 100


def bare(of: Problem, data: Path, place: Path, options: argparse.Namespace) -> Words:
    return [str(BARE), *map(str, (data, *of[:5], DECAY))]


def bare_top1(place: Path) -> float:
    return float(re.findall(r"top-1 ([\d.]+)", (place / "log").read_text())[-1])


class Contender(NamedTuple):
    command: Callable[..., Words]
    top1: Callable[[Path], float]


CONTENDERS = {
    "Trainyard": Contender(trainyard, trainyard_top1),
    "timm's train.py": Contender(timm_train, timm_top1),
    "timm's train.py, channels last": Contender(timm_channels_last, timm_top1),
    "torchvision's reference": Contender(reference, reference_top1),
    "bare loop": Contender(bare, bare_top1),
}


def lines_of(name: str, command: Words, place: Path) -> int:
    """Lines that a user writes: the command, its options, a recipe, a script."""
    options = sum(word.startswith("-") for word in command)
    own = {"Trainyard": place / "recipe.toml", "bare loop": BARE}.get(name)
    text = "" if own is None else own.read_text()
    return 1 + options + sum(bool(line.strip()) for line in text.splitlines())


# --- the runs ---


def run(problem: str, name: str, seed: int, options: argparse.Namespace) -> Run:
    """One run of one program."""
    of, contender = PROBLEMS[problem], CONTENDERS[name]
    place = options.folder / "runs" / f"{problem}-{re.sub('[^a-z]+', '-', name.lower())}-{seed}"
    shutil.rmtree(place, ignore_errors=True)  # of a run that was interrupted
    place.mkdir(parents=True)
    command = contender.command(of, options.folder / problem, place, options)
    seeded = {"Trainyard": [f"--run.seed={seed}"], "bare loop": []}
    if name.startswith("timm"):
        seeded[name] = [f"--seed={seed}"]
    watched = [sys.executable, "-m", "benchmarks.head.watched", str(place / "first"), str(seed)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with (place / "log").open("w") as log:
        began = time.time()
        result = subprocess.run(
            [*watched, *command, *seeded.get(name, [])],
            cwd=place,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
        ended = time.time()
    if result.returncode:
        raise SystemExit(f"{name} failed: see {place / 'log'}")
    return {
        "problem": problem,
        "contender": name,
        "seed": seed,
        "top1": contender.top1(place),
        "wall_s": ended - began,
        "first_step_s": float((place / "first").read_text()) - began,
        "lines": lines_of(name, command, place),
        "timed": not options.untimed,
    }


def runs(options: argparse.Namespace) -> list[Run]:
    """All runs, in turns; those that a call before this one finished are kept."""
    jobs = (
        {"problem": problem, "contender": name, "seed": seed}
        for problem, seed in itertools.product(options.problems, options.seeds)
        for name in turned(options.only, seed)
    )
    return missing_runs(
        options.folder,
        jobs,
        lambda job: run(job["problem"], job["contender"], job["seed"], options),
    )


def turned(names: Words, turn: int) -> Words:
    """The names, another one first at each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]


def missing_runs(folder: Path, jobs: Iterable[Run], run: Callable[[Run], Run]) -> list[Run]:
    """Runs the jobs that FOLDER/runs.jsonl lacks, and returns all of its lines."""
    file = folder / "runs.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for job in jobs:
        if select(found, **job):
            continue
        found.append(run(job))
        with file.open("a") as lines:
            lines.write(json.dumps(found[-1]) + "\n")
        print(found[-1], file=sys.stderr, flush=True)
    return found


# --- the tables ---


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def mean_and_error(top1: list[float]) -> str:
    percent = [100 * one for one in top1]
    if len(percent) == 1:
        return f"{percent[0]:.2f}"
    error = statistics.stdev(percent) / len(percent) ** 0.5
    return f"{statistics.mean(percent):.2f} ± {error:.2f}"


def table(found: list[Run]) -> str:
    ours = [one["wall_s"] for one in found if one["contender"] == "Trainyard" and one["timed"]]
    lines = [
        "| program | seeds | top-1, % | rounds | whole run, s | first step, s | Trainyard takes "
        "| lines |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in CONTENDERS:
        same = [one for one in found if one["contender"] == name]
        timed = [one for one in same if one["timed"]]
        if not same:
            continue
        walls = [one["wall_s"] for one in timed]
        ratio = statistics.median(ours) / statistics.median(walls) if ours and walls else None
        times = (
            [spread(walls), spread([one["first_step_s"] for one in timed])] if timed else ["", ""]
        )
        lines.append(
            f"| {name} | {len(same)} | {mean_and_error([one['top1'] for one in same])} "
            f"| {len(timed)} | {' | '.join(times)} | {'' if ratio is None else f'{ratio:.2f} x'} "
            f"| {same[0]['lines']} |"
        )
    return "\n".join(lines)


def text_of(found: list[Run], hardware: str) -> str:
    parts = [
        f"# Whole runs of four programs, {hardware}",
        "Top-1: mean over seeds ± standard error. Seconds: median (least to most) over rounds, a "
        "seed each, in turns, without other work on the machine; runs for accuracy alone are not "
        "among them. First step: from the start of the process to the end of the first update.",
    ]
    for problem, of in PROBLEMS.items():
        same = [one for one in found if one["problem"] == problem]
        if same:
            facts = ", ".join(f"{key} {value}" for key, value in of._asdict().items())
            parts += [f"## {problem}: {facts}", table(same)]
    return "\n\n".join(parts) + "\n"


def versions(options: argparse.Namespace) -> dict[str, str]:
    named: dict[str, Any] = {}
    exec((options.timm / "timm" / "version.py").read_text(), named)
    return {
        "torch": version("torch"),
        "torchvision": version("torchvision"),
        "timm's train.py": named["__version__"],
        "torchvision's references": (options.vision / "version.txt").read_text().strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timm", type=Path, required=True, help="a checkout of timm's repository")
    parser.add_argument("--vision", type=Path, required=True, help="one of torchvision's")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--untimed", action="store_true", help="the machine has other work")
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-head-to-head.json and .md")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    for key, script in (("timm", "train.py"), ("vision", "references/classification/train.py")):
        place = getattr(options, key).absolute() / script
        if not place.is_file():
            parser.error(f"--{key}: {place} is missing: give the folder of a checkout")
        setattr(options, key, getattr(options, key).absolute())
    prepare(options.folder)
    found = runs(options)
    text = text_of(found, options.hardware or f"{os.cpu_count()} cores")
    print(text)
    if options.hardware:
        name = f"{options.hardware}-head-to-head"
        save(name, {"versions": versions(options), "runs": found}, text)


if __name__ == "__main__":
    main()
