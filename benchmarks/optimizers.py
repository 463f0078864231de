"""A small real problem trained to convergence by every optimizer: scanned digits, a small ResNet.

python -m benchmarks.optimizers FOLDER [--hardware NAME] [--out benchmarks/results]
    [--only NAME ...] [--epochs 24] [--seeds 3] [--factors 0.5 1 2]

The `digits` recipe with another optimizer, its own learning rate and decay, and nothing else
changed, but for a constant rate after the warm-up where the optimizer needs no schedule. FOLDER is
for the data and the runs. Two runs at a time, each on one core: about 50 minutes in all on two
cores; `--epochs 8 --seeds 1` takes 8. --factors tries multiples of the
learning rates, which is how those below were found.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.saving import save
from trainyard.datasets.prepare.digits import prepare_digits

# Keys of [optim]: the name, its rate, its decay, and what the method is known for.
CONTENDERS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "sgd", "lr": 0.1, "weight_decay": 1e-3},
    "SGD, Nesterov": {"name": "sgd", "lr": 0.1, "weight_decay": 1e-3, "nesterov": True},
    "Adam": {"name": "adam", "lr": 4e-3, "weight_decay": 1e-4},
    "AdamW": {"name": "adamw", "lr": 4e-3, "weight_decay": 0.05},
    "AccumAdam, 4 steps": {"name": "accum_adam", "lr": 4e-3, "weight_decay": 1e-4},
    "AccumAdamW, 4 steps": {"name": "accum_adamw", "lr": 4e-3, "weight_decay": 0.05},
    "LAMB": {"name": "lamb", "lr": 0.02, "weight_decay": 0.02, "eps": 1e-6},
    "LAMB as Colossal-AI's": {
        "name": "lamb",
        "lr": 0.02,
        "weight_decay": 0.02,
        "eps": 1e-6,
        "bias_correction": False,
        "decay": "all",
    },
    "LARS": {"name": "lars", "lr": 5.0, "weight_decay": 1e-4},
    "Lion": {"name": "lion", "lr": 1.5e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]},
    "Muon": {"name": "muon", "lr": 4e-3, "weight_decay": 0.05, "momentum": 0.95},
    "Schedule-free SGD": {"name": "schedule_free_sgd", "lr": 2.0, "weight_decay": 1e-3},
    "Schedule-free AdamW": {"name": "schedule_free_adamw", "lr": 8e-3, "weight_decay": 0.05},
}

Run = dict[str, Any]


def run(folder: Path, contender: str, factor: float, seed: int, epochs: int) -> Run:
    """Train once, in a process of its own; evaluated at the end alone."""
    import torch
    from rich.console import Console

    from trainyard.config import load_recipe
    from trainyard.run.trainer import train
    from trainyard.world import World

    torch.set_num_threads(1)
    optim = CONTENDERS[contender]
    optim = optim | {"lr": optim["lr"] * factor}
    overrides = {f"optim.{key}": text(value) for key, value in optim.items()} | {
        "data.train": f"{folder}/digits/train",
        "data.val": f"{folder}/digits/val",
        "run.length": f"{epochs} epochs",
        "run.seed": str(seed),
        "run.eval_every": "0 steps",
        "run.save_every": "0 steps",
    }
    if "schedule_free" in optim["name"]:
        overrides["schedule.name"] = "constant"
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        config = load_recipe("digits", overrides)
        outcome = train(config, scratch, world=World(), console=Console(quiet=True))
        lines = [json.loads(line) for line in (Path(scratch) / "metrics.jsonl").open()]
    return {
        "optimizer": contender,
        "lr": optim["lr"],
        "weight_decay": optim["weight_decay"],
        "seed": seed,
        "steps": outcome.step,
        "top1": outcome.last["top1"],
        "val_loss": outcome.last["loss"],
        "train_loss": next(line["loss"] for line in reversed(lines) if line["kind"] == "train"),
        "seconds": time.perf_counter() - started,
    }


def text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def runs(options: argparse.Namespace) -> list[Run]:
    jobs = [
        (options.folder, contender, factor, seed, options.epochs)
        for seed in range(options.seeds)
        for contender in options.only
        for factor in options.factors
    ]
    found = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        for done in pool.map(run, *zip(*jobs, strict=True)):
            found.append(done)
            print(
                f"{done['optimizer']}, lr {done['lr']:g}, seed {done['seed']}: {done['top1']:.2%}"
            )
    return found


def table(found: list[Run]) -> str:
    lines = [
        "| optimizer | lr | weight decay | steps | top-1, % | loss | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, lr in dict.fromkeys((one["optimizer"], one["lr"]) for one in found):
        same = [one for one in found if (one["optimizer"], one["lr"]) == (name, lr)]
        top1 = [one["top1"] * 100 for one in same]
        loss = statistics.median(one["val_loss"] for one in same)
        seconds = statistics.median(one["seconds"] for one in same)
        lines.append(
            f"| {name} | {lr:g} | {same[0]['weight_decay']:g} | {same[0]['steps']} "
            f"| {statistics.median(top1):.1f} ({min(top1):.1f} to {max(top1):.1f}) "
            f"| {loss:.3f} | {seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hardware", default=f"{os.cpu_count()}-core CPU")
    parser.add_argument("--out", type=Path, help="folder for the table and the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0])
    options = parser.parse_args()
    prepare_digits(options.folder / "digits")
    found = runs(options)
    print(table(found))
    if options.out:
        write(found, options)


def write(found: list[Run], options: argparse.Namespace) -> None:
    about = {"hardware": options.hardware, "epochs": options.epochs, "optim": CONTENDERS}
    heading = (
        f"# Digits by each optimizer, {options.hardware}\n\n"
        f"364 images to validate; median of {options.seeds} seeds (least to most). The seconds are "
        "of a whole run, two at a time.\n\n"
    )
    save("cpu-optimizers", {**about, "runs": found}, heading + table(found), folder=options.out)


if __name__ == "__main__":
    main()
