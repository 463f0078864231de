"""Gains by recent habits on Fashion-MNIST over seeds: flips, schedules, Muon, averages, teacher.

trainyard data prepare fashion-mnist /usr/share/datasets/fashion-mnist FOLDER/packed
trainyard data pack FOLDER/packed FOLDER/data --format folder
python -m benchmarks.ablations FOLDER [--seeds 5] [--most N] [--hardware NAME]
    [--out benchmarks/results]

An eighth of the training images trains and a twelfth validates: the test images stay unseen. The
network is that of the recipe fashion-mnist, at half its widths. Each optimizer's rate is the best
of three with a seed of its own. FOLDER/runs.json keeps finished runs: the same command resumes with
the others, at most N of them. A quarter of an hour on one core.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import trainyard
from benchmarks.saving import RESULTS, save

STEPS, BRANCH = 240, 84  # the branches for 120 and 240 steps begin after 84 and 168
PER_CLASS = 1250  # images of each class: 6 in 10 train, the others validate
TUNING_SEED = 100
RATES: dict[str, tuple[float, ...]] = {
    "sgd": (0.3, 0.6, 1.2),
    "adamw": (2e-3, 6e-3, 2e-2),
    "muon": (2e-3, 6e-3, 2e-2),
}
AVERAGES = (0.9, 0.96, 0.985)
COMMON: dict[str, Any] = {
    "data.val_share": 0.4,
    "data.threads": 1,
    "model.options": {"widths": "16-32-64"},
    "batch.size": 128,
    "schedule.warmup": "40 steps",
    "run.length": f"{STEPS} steps",
    "run.eval_every": "0 steps",
    "run.save_every": "0 steps",
}
ADAPTIVE = {"optim.lr_scale": [], "optim.weight_decay": 0.05, "optim.nesterov": False}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw": {"optim.name": "adamw", **ADAPTIVE},
    "muon": {"optim.name": "muon", **ADAPTIVE, "optim.momentum": 0.95, "optim.nesterov": True},
}
BASE = "linear"
# By name: the optimizer, and what differs from the base.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "random flips": ("sgd", {"augment.flip_mode": "random"}),
    "cosine": ("sgd", {"schedule.name": "cosine"}),
    "linear, 120 steps": ("sgd", {"run.length": "120 steps"}),
    "AdamW": ("adamw", {}),
    "Muon": ("muon", {}),
    BASE: ("sgd", {"model.ema_decay": list(AVERAGES)}),
    "constant": (
        "sgd",
        {
            "schedule.name": "constant",
            "model.ema_decay": list(AVERAGES),
            "run.save_every": f"{BRANCH} steps",
            "run.keep": 9,
        },
    ),
    "decay at the end, 120 steps": (
        "sgd",
        {"run.length": "120 steps", "schedule.decay": "36 steps", "run.resume": BRANCH},
    ),
    "decay at the end": ("sgd", {"schedule.decay": "72 steps", "run.resume": 2 * BRANCH}),
    "teacher": (
        "sgd",
        {"model.options": {"widths": "32-64-128"}, "run.length": "360 steps"},
    ),
    "distilled": (
        "sgd",
        {"loss.teacher": "teacher-0", "loss.temperature": 2.0, "augment.label_smoothing": 0.0},
    ),
}
ONCE = ("teacher",)  # with the first seed alone

Run = dict[str, Any]
Job = tuple[str, int, dict[str, Any]]  # name, seed, keys


# --- the runs ---


def jobs(found: list[Run], seeds: int) -> Iterator[Job]:
    """The runs, in order; those of `found` decide the rate of each optimizer."""
    for name, rates in RATES.items():
        for rate in rates:
            keys = OPTIMIZERS[name] | {"optim.lr": rate}
            yield f"tuning {name} {rate:g}", TUNING_SEED, keys
    for seed, (name, (optimizer, own)) in itertools.product(range(seeds), ARMS.items()):
        if not (seed and name in ONCE):
            yield (
                name,
                seed,
                OPTIMIZERS[optimizer] | {"optim.lr": best_rate(found, optimizer)} | own,
            )


def link_part(folder: Path) -> None:
    """FOLDER/part: the first images of each class."""
    for images in sorted((folder / "data" / "train").glob("*/")):
        part = folder / "part" / images.name
        part.mkdir(parents=True)
        for image in sorted(images.iterdir())[:PER_CLASS]:
            (part / image.name).hardlink_to(image)


def best_rate(found: list[Run], optimizer: str) -> float:
    top1 = {one["name"]: one["top1"] for one in found}
    return max(RATES[optimizer], key=lambda rate: float(top1[f"tuning {optimizer} {rate:g}"]))


def run_one(folder: Path, job: Job) -> Run:
    name, seed, own = job
    keys = COMMON | own | {"run.seed": seed}
    if "run.resume" in own:
        step = own["run.resume"]
        keys["run.resume"] = str(folder / f"runs/constant-{seed}/checkpoints/step-{step:08d}")
    if "loss.teacher" in own:
        keys["loss.teacher"] = str(folder / "runs" / own["loss.teacher"])
    run = folder / "runs" / f"{name.replace(' ', '-')}-{seed}"
    shutil.rmtree(run, ignore_errors=True)  # of a call that was cut off
    used = cpu_seconds()
    outcome = trainyard.train(
        "fashion-mnist",
        run=run,
        data=folder / "part",
        overrides=keys,
        console=Console(quiet=True),
    )
    if outcome.stopped:
        raise SystemExit(f"{name}, {seed}: stopped; the same command resumes")
    last = {key: value for key, value in outcome.last.items() if key.endswith(("top1", "loss"))}
    spent = {"steps": outcome.step, "cpu_seconds": cpu_seconds() - used}
    return {"name": name, "seed": seed, **last, **spent}


def cpu_seconds() -> float:
    """The processor time of this process and of its loaders that have ended."""
    return sum(os.times()[:4])


def all_runs(options: argparse.Namespace) -> tuple[list[Run], bool]:
    """The finished runs, and whether they are all."""
    kept = options.folder / "runs.json"
    found: list[Run] = json.loads(kept.read_text()) if kept.exists() else []
    begun = 0
    for job in jobs(found, options.seeds):
        if any((one["name"], one["seed"]) == job[:2] for one in found):
            continue
        if begun == options.most:
            return found, False
        begun += 1
        found.append(run_one(options.folder, job))
        kept.write_text(json.dumps(found, indent=1))
        one = found[-1]
        print(f"{one['name']}, {one['seed']}: {one['top1']:.2%}, {one['cpu_seconds']:.0f} s of CPU")
    return found, True


# --- the table ---


def table(found: list[Run]) -> str:
    lines = [
        "| run | seeds | top-1, % | against linear | loss | CPU seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(one["name"] for one in found):
        same = [one for one in found if one["name"] == name]
        lines.append(row(name, same, "", found))
        if "ema_top1" in same[0]:
            lines += [
                row(f"{name}, average of {decay:g}", same, f"ema_{decay:g}_", found)
                for decay in AVERAGES
            ]
    return "\n".join(lines) + "\n"


def row(name: str, same: list[Run], prefix: str, found: list[Run]) -> str:
    top1 = [100 * one[f"{prefix}top1"] for one in same]
    loss = statistics.mean(one[f"{prefix}loss"] for one in same)
    seconds = "" if prefix else f"{statistics.mean(one['cpu_seconds'] for one in same):.0f}"
    base = {one["seed"]: 100 * one["top1"] for one in found if one["name"] == BASE}
    pairs = zip(top1, same, strict=True)
    gaps = [value - base[one["seed"]] for value, one in pairs if one["seed"] in base]
    gap = "" if (name == BASE or len(gaps) < 2) else with_error(gaps, "+.2f")
    return f"| {name} | {len(same)} | {with_error(top1, '.2f')} | {gap} | {loss:.3f} | {seconds} |"


def with_error(values: list[float], form: str) -> str:
    """The mean, with the standard error of several values."""
    mean = format(statistics.mean(values), form)
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}" if values[1:] else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--most", type=int, help="number of runs to begin in this call")
    parser.add_argument("--hardware", default="2-core-vm")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not (options.folder / "part").exists():
        link_part(options.folder)
    found, is_complete = all_runs(options)
    print(table(found))
    if is_complete:
        heading = (
            "# Ablations on Fashion-MNIST\n\n"
            "7,500 training images train, 5,000 others validate: `whitened_convnet` with "
            f"widths 16-32-64, {STEPS} steps of 128 images where nothing else is said, SGD with a "
            "linear decay from the warm-up to the end, alternating flips. Mean and standard error "
            "over the seeds; differences from the base are by seed. Tuning runs have a seed of "
            "their own. The seconds of a branch are its own steps'. The run `teacher` is twice as "
            f"wide, 360 steps long. Hardware: {options.hardware}, one thread.\n\n"
        )
        figures = {"hardware": options.hardware, "common": COMMON, "arms": ARMS, "runs": found}
        name = f"{options.hardware}-ablations"
        save(name, figures, heading + table(found), folder=options.out)


if __name__ == "__main__":
    main()
