"""Where replicas end that synchronise by all-reduce, by gossip or now and then, on Fashion-MNIST.

python -m benchmarks.convergence FOLDER [--replicas 4] [--only NAME ...] [--seeds 5]
    [--epochs 2] [--simulated] [--tiles] [--seconds 100] [--hardware NAME]

One recipe (benchmarks/fashion_mnist.py: SGD, 256 images a step over all replicas) with another
[average] section; the same images in the same order, on two replicas per node, over gloo. Learning
rates are chosen on a tenth of the training images that is held out, by the loss of other seeds:
three rates a factor of 2 apart, and more while the best one is the largest or the smallest. The
rates are chosen for all-reduce, one-peer gossip, periodic averaging and each outer momentum, on
four replicas in two epochs; variants of these, more replicas and longer runs take the rates of
their kind.

With --simulated one process computes all replicas of a run, a run on each core: see
benchmarks/simulated.py, which cannot do all contenders. --tiles takes benchmarks/tiles.py in place
of Fashion-MNIST, and another FOLDER.

FOLDER is for the data and `convergence.jsonl`, the finished runs. The program starts no run after
--seconds: call it again until nothing is left. --hardware writes the table.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import tiles
from benchmarks.fashion_mnist import (
    HELD_OUT,
    RANKS_PER_NODE,
    SOURCE,
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
    train_rank,
)
from benchmarks.saving import listed, save
from benchmarks.simulated import simulated
from trainyard.averaging.config import DEFAULT_EVERY, DEFAULT_TOPOLOGY, AverageConfig
from trainyard.averaging.topology import Round, rounds

TUNING = (100, 101, 102)  # seeds
TUNED_AT = (4, 2)  # replicas and epochs
BASE = "all-reduce"
EXPONENTIAL = {"name": "gossip", "topology": "one-peer-exponential"}
PERIODIC = {"name": "periodic", "every": 8}


class Contender(NamedTuple):
    average: dict[str, Any]
    """Keys of [average]."""
    rate: float = 0.1
    """The middle of the first three learning rates."""
    rate_of: str | None = None
    """The contender whose learning rate it takes."""
    is_stream: bool = False


def with_global_rounds(size: int, local_size: int, every: int = 16) -> list[Round]:
    """One-peer exponential rounds, of which some are of all instead (Chen et al. 2021)."""
    peers = rounds("one-peer-exponential", size, local_size)
    found = [peers[number % len(peers)] for number in range(every * len(peers))]
    found[every - 1 :: every] = [[tuple(range(size))]] * len(peers)
    return found


def with_more_global_rounds(size: int, local_size: int) -> list[Round]:
    return with_global_rounds(size, local_size, every=8)


_GOSSIP = "gossip, one-peer exponential"
_PERIODIC = "periodic, every 8 steps"
CONTENDERS = {
    BASE: Contender({"name": "allreduce"}),
    "sharded": Contender({"name": "sharded"}, rate_of=BASE),
    "all-reduce of a stream (join)": Contender({"name": "allreduce"}, rate_of=BASE, is_stream=True),
    "all-reduce, bf16": Contender({"name": "allreduce", "compress": "bf16"}, rate_of=BASE),
    _GOSSIP: Contender(EXPONENTIAL),
    "the same, no overlap": Contender(EXPONENTIAL | {"overlap": False}, rate_of=_GOSSIP),
    "the same, bf16": Contender(EXPONENTIAL | {"compress": "bf16"}, rate_of=_GOSSIP),
    "the same, every 16th round of all": Contender(
        EXPONENTIAL | {"topology": "benchmarks.convergence:with_global_rounds"}, rate_of=_GOSSIP
    ),
    "the same, no overlap, every 8th round of all": Contender(
        EXPONENTIAL
        | {"topology": "benchmarks.convergence:with_more_global_rounds", "overlap": False},
        rate_of=_GOSSIP,
    ),
    "gossip, complete": Contender({"name": "gossip", "topology": "complete"}, rate_of=_GOSSIP),
    "gossip, ring": Contender({"name": "gossip", "topology": "ring"}, rate_of=_GOSSIP),
    "gossip, alternating exponential ring": Contender(
        {"name": "gossip", "topology": "alternating-exponential-ring"}, rate_of=_GOSSIP
    ),
    "periodic, every 2 steps": Contender(PERIODIC | {"every": 2}, rate_of=_PERIODIC),
    "periodic, every 4 steps": Contender(PERIODIC | {"every": 4}, rate_of=_PERIODIC),
    _PERIODIC: Contender(PERIODIC),
    "periodic, DiLoCo's momentum": Contender(
        PERIODIC | {"outer_lr": 0.7, "outer_momentum": 0.9}, rate=0.05
    ),
}


# --- the runs ---


def job_of(options: argparse.Namespace, name: str, lr: float, seed: int, held_out: bool) -> Job:
    contender, epochs = CONTENDERS[name], options.epochs
    run = {
        "contender": name,
        "replicas": options.replicas,
        "epochs": epochs,
        "lr": lr,
        "seed": seed,
    }
    own = {f"average.{key}": value for key, value in contender.average.items()}
    if contender.is_stream:
        own |= {
            "data.order": "join",
            "data.samples": 60_000,
            "data.train": f"{options.folder}/web/imagenet-train-{{000000..000059}}.tar",
        }
    keys = (
        recipe(options.folder, epochs=epochs, seed=seed, held_out=held_out) | {"optim.lr": lr} | own
    )
    return Job(run | {"held_out": held_out}, keys, options.replicas)


def next_jobs(found: list[Run], options: argparse.Namespace) -> list[Job]:
    """The missing runs: first those that choose the rates, then those on the test images."""
    tuning: list[Any] = []
    final: list[Any] = []
    for name in options.only:
        tuned = CONTENDERS[name].rate_of or name
        known = by_rate(runs_of(found, tuned, *TUNED_AT, held_out=True), len(TUNING))
        rates = missing_rates(known, CONTENDERS[tuned].rate)
        if not rates:
            final += [(name, best_rate(known), seed, False) for seed in range(options.seeds)]
        elif (options.replicas, options.epochs) == TUNED_AT:
            tuning += [(tuned, rate, seed, True) for rate in rates for seed in TUNING]
    final.sort(key=lambda each: each[2])
    jobs = [job_of(options, *each) for each in dict.fromkeys(tuning or final)]
    return left(jobs, found)


def runs_of(
    found: list[Run], name: str, replicas: int, epochs: int, *, held_out: bool
) -> list[Run]:
    return select(found, contender=name, replicas=replicas, epochs=epochs, held_out=held_out)


# --- the table ---

NOTES = """\
Top-1 on the 10,000 test images of the mean of the replicas: mean over the seeds with its standard
error, and the difference from all-reduce by pairs of a seed, in points. Distance: root mean square
over the replicas of how far their weights lie from the mean, after the first epoch and at the end.
Sent: bytes that a replica sends per step, over those of its weights; collectives are rings.

"""


def table(found: list[Run]) -> str:
    lines = [
        "| replicas | epochs | averager | rate | seeds | top-1, % | against all-reduce | loss "
        "| distance after an epoch | at the end | sent |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for size in sorted({(run["replicas"], run["epochs"]) for run in found}):
        base = runs_of(found, BASE, *size, held_out=False)
        for name in CONTENDERS:
            runs = runs_of(found, name, *size, held_out=False)
            if runs:
                lines.append(row(name, runs, base))
    return "\n".join(lines) + "\n"


def row(name: str, runs: list[Run], base: list[Run]) -> str:
    replicas, distances = runs[0]["replicas"], [run["distances"] for run in runs]
    apart = [
        "" if distances[0][0] is None else f"{statistics.mean(each[at] for each in distances):.3f}"
        for at in (0, -1)
    ]
    loss = statistics.mean(run["loss"] for run in runs)
    sent = sent_share(AverageConfig(**CONTENDERS[name].average), replicas)
    return (
        f"| {replicas} | {runs[0]['epochs']} | {name} | {runs[0]['lr']:g} | {len(runs)} "
        f"| {percent(runs)} | {gap(runs, base)} | {loss:.4f} | {' | '.join(apart)} | {sent:.2f} |"
    )


def sent_share(average: AverageConfig, replicas: int) -> float:
    """Mean bytes that a replica sends per step, over those of its weights; rings are taken."""
    ring = 2 * (replicas - 1) / replicas
    size = 0.5 if average.compress else 1.0
    if average.name == "gossip":
        turns = rounds(average.topology or DEFAULT_TOPOLOGY, replicas, RANKS_PER_NODE)
        # A member of a group sends bf16 to each peer, and other types around a ring.
        sent = [
            len(group) - 1 if average.compress else 2 * (len(group) - 1) / len(group)
            for turn in turns
            for group in turn
            for _ in group
        ]
        return size * statistics.mean(sent)
    if average.name == "periodic":
        return ring / (average.every or DEFAULT_EVERY)
    return size * ring * (1.5 if average.name == "sharded" else 1)


def gap(runs: list[Run], base: list[Run]) -> str:
    """Points of top-1 above `base`: mean and standard error of the differences by seed."""
    top1 = {run["seed"]: run["top1"] for run in base}
    gaps = [100 * (run["top1"] - top1[run["seed"]]) for run in runs if run["seed"] in top1]
    if runs == base or len(gaps) < 2:
        return ""
    return f"{statistics.mean(gaps):+.2f} ± {standard_error(gaps):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=TUNED_AT[0])
    parser.add_argument("--epochs", type=int, default=TUNED_AT[1], help="of 234 steps")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--simulated", action="store_true", help="see benchmarks/simulated.py")
    parser.add_argument("--tiles", action="store_true", help="see benchmarks/tiles.py")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-convergence.json and .md")
    options = parser.parse_args()
    source = SOURCE
    if options.tiles:
        source = options.folder / "tiles"
        if not source.exists():
            tiles.write(source)
    prepare(options.folder, source)
    found = run_all(
        partial(next_jobs, options=options),
        options.folder / "convergence.jsonl",
        ranks=1 if options.simulated else options.replicas,
        seconds=options.seconds,
        work=simulated if options.simulated else train_rank,
    )
    print(table(found))
    if options.hardware:
        about = {
            "hardware": options.hardware,
            "torch": torch.__version__,
            "images": "tiles of photographs" if options.tiles else "Fashion-MNIST",
            "replicas": "in one process" if options.simulated else "a process each",
            "steps of an epoch": 60_000 // 256,
            "seeds that choose rates": len(TUNING),
            "held out to choose rates": HELD_OUT,
        }
        text = f"# Replicas that synchronise in different ways\n\n{listed(about)}\n\n"
        contenders = {name: contender.average for name, contender in CONTENDERS.items()}
        figures = about | {"average": contenders, "runs": found}
        kind = "convergence-tiles" if options.tiles else "convergence"
        save(f"{options.hardware}-{kind}", figures, text + NOTES + table(found))


if __name__ == "__main__":
    main()
