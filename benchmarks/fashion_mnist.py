"""Fast runs on Fashion-MNIST: its data, a small network, processes that train run after run.

The package `dataset-fashion-mnist` of Debian has the data. A run is `trainyard.run.trainer.train`,
on one rank or several over gloo; torch is imported once, before the processes are forked.
"""

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from trainyard.config import load_recipe
from trainyard.errors import DivergedError
from trainyard.run.trainer import train
from trainyard.world import World

SOURCE = Path("/usr/share/datasets/fashion-mnist")
RANKS_PER_NODE = 2
HELD_OUT = 0.1  # share of the training images by which rates are chosen

Run = dict[str, Any]
"""The settings of a run, and its figures."""


def network(num_classes: int) -> nn.Module:
    """Three convolutions that halve the image, batch norm, a classifier: 34,000 weights."""
    layers: list[nn.Module] = []
    for width_in, width, side in ((1, 16, 5), (16, 32, 3), (32, 64, 3)):
        layers.append(nn.Conv2d(width_in, width, side, 2, side // 2, bias=False))
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, num_classes))


def prepare(folder: Path, source: Path = SOURCE) -> None:
    """Pixels in `packed`, and shards for a stream in `web`, from the package's files or alike."""
    packed, web = (folder / name for name in ("packed", "web"))
    others = [] if source == SOURCE else ["--no-checksum"]
    steps = {
        packed: ["prepare", "fashion-mnist", f"{source}", f"{packed}", *others],
        web: ["pack", "--format", "webdataset", f"{packed}", f"{web}"],
    }
    for made, arguments in steps.items():
        if not (made / "dataset.json").exists():
            subprocess.run([sys.executable, "-m", "trainyard", "data", *arguments], check=True)


# --- runs ---


@dataclass(frozen=True)
class Job:
    run: Run
    """The settings that tell the run from others."""
    keys: dict[str, Any]
    """Overrides of the recipe."""
    ranks: int = 1


def recipe(folder: Path, *, epochs: int, seed: int, held_out: bool) -> dict[str, Any]:
    """Overrides of the recipe fashion-mnist that make it fast."""
    packed = f"{folder}/packed/fashion-mnist"
    keys: dict[str, Any] = {
        "model.name": "benchmarks.fashion_mnist:network",
        "model.options": {},
        "data.train": packed + "-train-000000.packed",
        "data.val": packed + "-val-000000.packed",
        "data.threads": 1,
        "augment.flip_mode": "random",
        "augment.translate": 0,
        "augment.label_smoothing": 0.0,
        "optim.momentum": 0.9,
        "optim.weight_decay": 5e-4,
        "optim.lr_scale": [],
        "schedule.name": "cosine",
        "schedule.warmup": "10%",
        "schedule.warmup_from": 0.0,
        "batch.size": 256,
        "run.length": f"{epochs} epochs",
        "run.seed": seed,
    }
    if held_out:
        keys |= {"data.val": None, "data.val_share": HELD_OUT}
    return keys


def train_rank(rank: int, job: Job, port: int, folder: Path) -> Run:
    """The figures of a run, on one of its ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    local_size = min(RANKS_PER_NODE, job.ranks)
    node, local_rank = divmod(rank, local_size)
    world = World(rank, job.ranks, local_rank, local_size, node, job.ranks // local_size)
    config = load_recipe("fashion-mnist", job.keys)
    begun = time.perf_counter()
    try:
        outcome = train(config, folder, world=world, console=Console(quiet=True))
    except DivergedError as error:
        return {"top1": None, "error": f"{error}"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    distances = [line.get("consensus_distance") for line in lines if line["kind"] == "val"]
    return {
        "top1": outcome.last["top1"],
        "loss": outcome.last["loss"],
        "train_loss": next(line["loss"] for line in reversed(lines) if line["kind"] == "train"),
        "distances": distances,  # at the end of each epoch
        "steps": outcome.step,
        "seconds": round(time.perf_counter() - begun, 1),
    }


Work = Callable[[int, Job, int, Path], Run]
"""A function like `train_rank`, which each process of a team calls for a job."""


class Team:
    """Processes that train the ranks of one run after another."""

    def __init__(self, ranks: int, core: int | None = None, work: Work = train_rank) -> None:
        fork = get_context("fork")
        self.pipes = []
        for rank in range(ranks):
            ours, theirs = fork.Pipe()
            fork.Process(target=_serve, args=(rank, core, theirs, work), daemon=True).start()
            self.pipes.append(ours)

    def start(self, job: Job, folder: Path) -> None:
        self.job = job
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for pipe in self.pipes:
            pipe.send((job, port, folder))

    def finish(self) -> Run:
        """The figures of the job. SystemExit with the traceback of a rank that failed."""
        found: list[Run | str] = [pipe.recv() for pipe in self.pipes]
        figures = [each for each in found if not isinstance(each, str)]
        if len(figures) < len(found):
            raise SystemExit(next(each for each in found if isinstance(each, str)))
        return self.job.run | figures[0]

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)


def _serve(rank: int, core: int | None, pipe: Any, work: Work) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    while (task := pipe.recv()) is not None:
        try:
            pipe.send(work(rank, *task))
        except BaseException:
            pipe.send(traceback.format_exc())


def run_all(
    next_jobs: Callable[[list[Run]], list[Job]],
    path: Path,
    *,
    ranks: int,
    seconds: float,
    work: Work = train_rank,
) -> list[Run]:
    """Trains what `next_jobs` still wants, given the runs so far. A run is a line of `path`.

    Starts no run after `seconds`. A team has `ranks` processes; single ones have a core each.
    """
    begun = time.monotonic()
    found = [json.loads(line) for line in path.open()] if path.exists() else []
    cores = sorted(os.sched_getaffinity(0))
    # A single rank would take all cores, and threads that share them wait for each other, busily.
    single = [Team(1, core, work) for core in cores] if ranks == 1 else []
    teams = single or [Team(ranks, work=work)]
    busy: dict[Any, Team] = {}
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        while True:
            under_way = [team.job.run for team in busy.values()]
            jobs = [job for job in next_jobs(found) if job.run not in under_way]
            if time.monotonic() - begun > seconds:
                jobs = []
            idle = [team for team in teams if team not in busy.values()]
            for team, job in zip(idle, jobs, strict=False):
                team.start(job, Path(tempfile.mkdtemp(dir=scratch)) / "run")
                busy[team.pipes[0]] = team
            if not busy:
                break
            for pipe in connection.wait(list(busy)):
                run = busy.pop(pipe).finish()
                found.append(run)
                with path.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print(*run.values(), flush=True)
    for team in teams:
        team.end()
    return found


# --- finished runs ---


def select(found: list[Run], **settings: Any) -> list[Run]:
    """The runs with these settings."""
    return [run for run in found if run | settings == run]


def left(jobs: list[Job], found: list[Run]) -> list[Job]:
    """The jobs without a finished run."""
    return [job for job in jobs if not select(found, **job.run)]


# --- learning rates ---


def by_rate(tuned: list[Run], seeds: int) -> dict[float, float]:
    """Mean loss on the held-out images by rate, if all seeds are done; infinite if one failed."""
    losses: dict[float, list[float]] = {}
    for run in tuned:
        failed = run["top1"] is None
        losses.setdefault(run["lr"], []).append(math.inf if failed else run["loss"])
    return {lr: statistics.mean(each) for lr, each in losses.items() if len(each) == seeds}


def missing_rates(known: dict[float, float], middle: float) -> list[float]:
    """The rates that are tried next: none once the best of `known` has a neighbour on both sides.

    They are a factor of 2 apart, the first three around `middle`.
    """
    first = [rate for rate in (middle, middle / 2, middle * 2) if rate not in known]
    if first:
        return first
    best = best_rate(known)
    return [rate for rate in (best / 2, best * 2) if rate not in known]


def best_rate(known: dict[float, float]) -> float:
    return min(known, key=lambda rate: known[rate])


# --- figures ---


def percent(runs: list[Run]) -> str:
    """Mean and standard error of top-1 over the seeds."""
    top1 = [100 * run["top1"] for run in runs]
    return f"{statistics.mean(top1):.2f}" + (f" ± {standard_error(top1):.2f}" if top1[1:] else "")


def standard_error(values: list[float]) -> float:
    """The standard error of the mean of two values or more."""
    return float(statistics.stdev(values) / len(values) ** 0.5)
