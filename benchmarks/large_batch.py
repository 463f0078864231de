"""Accuracy against batch size of four optimizers, at equal epochs, on Fashion-MNIST.

python -m benchmarks.large_batch FOLDER [--only NAME ...] [--batches 64 256 1024 4096 16384]
    [--seeds 3] [--seconds 100] [--hardware NAME]

The recipe and the network of benchmarks/fashion_mnist.py on one process. The learning rate of each
pair of optimizer and batch is chosen on a tenth of the training images that is held out, by the
loss of one seed: the centre is a rule (SGD and LARS: in proportion to the batch; AdamW and LAMB: to
its square root) from the best rate at the next smaller batch, beside it are half and twice of it,
and more rates follow while the best one is the largest or the smallest.

FOLDER is for the data and `large-batch.jsonl`, the finished runs. The program starts no run after
--seconds: call it again until nothing is left. --hardware writes the table and the chart.
"""

import argparse
import math
import statistics
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.fashion_mnist import (
    HELD_OUT,
    Job,
    Run,
    best_rate,
    by_rate,
    left,
    missing_rates,
    percent,
    prepare,
    recipe,
    run_all,
    select,
    standard_error,
)
from benchmarks.saving import RESULTS, listed, save

EPOCHS = 2
TUNING = 100  # seed
BATCHES = (64, 256, 1024, 4096, 16_384)


class Rule(NamedTuple):
    keys: dict[str, Any]
    """Keys of [optim]."""
    rate: float
    """The middle of the first three learning rates at the smallest batch."""
    power: float
    """The rate grows with this power of the batch."""


OPTIMIZERS = {
    "sgd": Rule({"nesterov": True, "weight_decay": 5e-4}, 0.05, 1.0),
    "lars": Rule({"nesterov": True, "weight_decay": 5e-4}, 2.0, 1.0),
    "adamw": Rule({"nesterov": False, "weight_decay": 0.05}, 2e-3, 0.5),
    "lamb": Rule({"nesterov": False, "weight_decay": 0.05}, 4e-3, 0.5),
}

NOTES = f"""\
Mean top-1 on the 10,000 test images over the seeds, with its standard error (number of
seeds) and learning rate. {EPOCHS} epochs each, so the steps become fewer as the batch grows.

"""


def job_of(folder: Path, name: str, batch: int, lr: float, seed: int, held_out: bool) -> Job:
    run = {"optimizer": name, "batch": batch, "epochs": EPOCHS, "lr": lr, "seed": seed}
    run |= {"held_out": held_out}
    keys = recipe(folder, epochs=EPOCHS, seed=seed, held_out=held_out)
    own = OPTIMIZERS[name].keys | {"name": name, "lr": lr}
    return Job(run, keys | {"batch.size": batch} | {f"optim.{key}": own[key] for key in own})


def next_jobs(found: list[Run], options: argparse.Namespace) -> list[Job]:
    """The missing runs: those that choose an optimizer's rates, by batch; then the seeds."""
    tuning: list[Job] = []
    final: list[Job] = []
    for name in options.only:
        middle, before = OPTIMIZERS[name].rate, options.batches[0]
        for batch in options.batches:
            middle *= 2 ** round(OPTIMIZERS[name].power * math.log2(batch / before))
            known = by_rate(runs_of(found, name, batch, held_out=True), 1)
            if rates := missing_rates(known, middle):
                tuning += [job_of(options.folder, name, batch, lr, TUNING, True) for lr in rates]
                break
            middle, before = best_rate(known), batch
            for seed in range(options.seeds):
                final.append(job_of(options.folder, name, batch, middle, seed, False))
    final.sort(key=lambda job: int(job.run["seed"]))
    jobs = tuning + final
    return left(jobs, found)


def runs_of(found: list[Run], name: str, batch: int, *, held_out: bool) -> list[Run]:
    return select(found, optimizer=name, batch=batch, epochs=EPOCHS, held_out=held_out)


# --- the table and the chart ---


def table(found: list[Run]) -> str:
    finals = [run for run in found if not run["held_out"] and run["top1"] is not None]
    names = [name for name in OPTIMIZERS if any(run["optimizer"] == name for run in finals)]
    lines = [f"| batch | steps | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for batch in sorted({run["batch"] for run in finals}):
        steps = next(run["steps"] for run in finals if run["batch"] == batch)
        lines.append(f"| {batch:,} | {steps:,} | {' | '.join(cells(finals, names, batch))} |")
    return "\n".join(lines) + "\n"


def cells(finals: list[Run], names: list[str], batch: int) -> Iterator[str]:
    for name in names:
        runs = runs_of(finals, name, batch, held_out=False)
        yield f"{percent(runs)} ({len(runs)}), rate {runs[0]['lr']:g}" if runs else ""


def draw(path: Path, found: list[Run]) -> None:
    """Top-1 against the batch, a line per optimizer, with standard errors."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 8})
    figure, axis = pyplot.subplots(figsize=(6, 3.6))
    colours = ("#1f5fa8", "#c2571a", "#2e8b57", "#8a4fa3")
    finals = [run for run in found if not run["held_out"] and run["top1"] is not None]
    for name, colour in zip(OPTIMIZERS, colours, strict=True):
        batches = sorted({run["batch"] for run in finals if run["optimizer"] == name})
        tops = [
            [100 * run["top1"] for run in runs_of(finals, name, b, held_out=False)] for b in batches
        ]
        means = [statistics.mean(each) for each in tops]
        errors = [standard_error(each) if each[1:] else 0.0 for each in tops]
        axis.errorbar(batches, means, errors, label=name, color=colour, marker="o", markersize=3)
    axis.set_xscale("log", base=2)
    ticks = sorted({run["batch"] for run in finals})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_xlabel("batch size")
    axis.set_ylabel("top-1, %")
    axis.set_title(f"Fashion-MNIST, {EPOCHS} epochs", fontsize=9)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-large-batch.*")
    options = parser.parse_args()
    prepare(options.folder)
    wanted = partial(next_jobs, options=options)
    path = options.folder / "large-batch.jsonl"
    found = run_all(wanted, path, ranks=1, seconds=options.seconds)
    print(table(found))
    if options.hardware:
        name = f"{options.hardware}-large-batch"
        chart = f"{date.today()}-{name}.svg"
        about = {
            "hardware": options.hardware,
            "torch": torch.__version__,
            "epochs": EPOCHS,
            "held out to choose rates": HELD_OUT,
        }
        text = f"# Accuracy against batch size\n\n{listed(about)}\n\n![Top-1 by batch]({chart})\n\n"
        save(name, about | {"runs": found}, text + NOTES + table(found))
        draw(RESULTS / chart, found)


if __name__ == "__main__":
    main()
