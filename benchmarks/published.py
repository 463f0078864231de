"""Estimates beside throughputs and runs that others have published, which are in published.toml.

python -m benchmarks.published [--hardware NAME]

Prints by which factor each row took longer than estimated, and how much the shares of
trainyard/estimate/estimate.py depend on a row: each throughput is also estimated with the shares
that the others alone would have given.
"""

import argparse
import math
import statistics
import tomllib
from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.saving import save
from trainyard.config import RunConfig, load_recipe, override
from trainyard.estimate.estimate import (
    CONVOLUTION,
    MATRIX,
    MOVES,
    RANGE,
    Cluster,
    Workload,
    build_workload,
    estimate_run,
    image_seconds,
    peak_flops,
)
from trainyard.hardware import accelerators

IMAGENET = 1_281_167
ROWS: dict[str, list[dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text()
)
SHARES = tuple(
    (matrix / 20, convolution / 20, moves / 4)
    for matrix, convolution, moves in product(range(8, 20), range(10, 30), range(30, 56))
)


class Cell(NamedTuple):
    source: str
    what: str
    where: str
    published: float  # images per second, or minutes
    estimated: float
    longer: float  # time as published, over that estimated


def throughput(row: dict[str, Any]) -> Cell:
    workload, cluster = work_of(row["model"]), cluster_of(row["device"])
    rate = 1 / sum(image_seconds(workload, cluster))
    published = row["published"]
    return Cell(
        row["source"], row["model"], row["device"], published, rate, longer=rate / published
    )


def run(row: dict[str, Any]) -> Cell:
    """With data that are always there: what the loaders of others can do is not known."""
    workload = build_workload(load_recipe(row["recipe"], row.get("keys", {})), IMAGENET)
    estimate = estimate_run(workload, cluster_of(row["device"]), row["gpus"])
    published, minutes = row["minutes"], 60 * estimate.hours.likely
    where = f"{row['gpus']} {row['device']}"
    return Cell(row["source"], row["recipe"], where, published, minutes, longer=published / minutes)


def by_source(cells: Iterable[Cell]) -> dict[str, float]:
    """The median of each source's factors either way: rows of one source are no trials of their
    own. What follows a comma is a part of it, or a guess about it."""
    factors: dict[str, list[float]] = {}
    for cell in cells:
        source = cell.source.partition(",")[0]
        factors.setdefault(source, []).append(max(cell.longer, 1 / cell.longer))
    return {source: statistics.median(of) for source, of in factors.items()}


def typical(cells: Iterable[Cell]) -> float:
    """The median over the sources."""
    return statistics.median(by_source(cells).values())


def covered(factors: Iterable[float]) -> int:
    """The number of rows inside of the range that is printed."""
    return sum(RANGE[0] <= factor <= RANGE[1] for factor in factors)


@cache
def work_of(model: str) -> Workload:
    keys = {"model.name": model, "batch.precision": "fp16", "data.image_size": "224"}
    return build_workload(override(RunConfig(), keys), IMAGENET)


def cluster_of(device: str) -> Cluster:
    return Cluster(accelerators()[device], None, math.inf, 12.5e9, None)


# --- how the shares were fitted ---


@cache
def logs(shares: tuple[float, float, float]) -> tuple[float, ...]:
    """Logarithms of the throughputs' errors, with other shares."""
    matrix, convolution, moves = shares
    found = []
    for row in ROWS["throughputs"]:
        work, device = work_of(row["model"]), accelerators()[row["device"]]
        seconds = (work.matrix / matrix + work.convolution / convolution) / peak_flops(
            device, "fp16"
        )
        seconds += moves * work.moved / device.bandwidth
        found.append(math.log(1 / seconds / row["published"]))
    return tuple(found)


def deviation(errors: Iterable[float]) -> float:
    """The root of the mean square, as a factor."""
    return math.exp(math.sqrt(statistics.mean(error**2 for error in errors)))


def left_out() -> list[float]:
    """The error of each row with the shares that are best for the others."""
    found = []
    for number in range(len(ROWS["throughputs"])):
        best = min(
            SHARES,
            key=lambda shares: deviation(e for i, e in enumerate(logs(shares)) if i != number),
        )
        found.append(logs(best)[number])
    return found


# --- tables ---

ABOUT = """
Data are always there, and evaluation is counted. FFCV's images were in memory. Composer's grew in
the course of the run, to sizes that the source at hand does not state: two are tried.
DeepLearningExamples' minutes are those of its throughput on 8 GPUs, which is 6.7 times that on
one: its loader. System D's server is "not a standard DGX" with A100 of whichever kind; on its 4
GPUs the loader gave 7,320 images/s at least, so that neither ViT-B/16 (1,360) nor ViT-L/32 (2,820)
waited for it, and ViT-B/32 may have.
"""


def table(cells: list[Cell], unit: str) -> str:
    lines = [f"| source | what | where | published, {unit} | estimated | took longer by |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {cell.source} | {cell.what} | {cell.where} | {digits(cell.published)} "
        f"| {digits(cell.estimated)} | {cell.longer:.2f} |"
        for cell in cells
    ]
    return "\n".join(lines)


def digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-published.json and .md")
    options = parser.parse_args()
    rates, runs = [throughput(row) for row in ROWS["throughputs"]], [run(r) for r in ROWS["runs"]]
    of_rates, of_runs = [cell.longer for cell in rates], [cell.longer for cell in runs]
    own = deviation(logs((MATRIX, CONVOLUTION, MOVES)))
    inside = f"{covered(of_rates + of_runs)} of {len(of_rates + of_runs)}"
    parts = [
        "# What `trainyard estimate` says of published runs",
        f"The typical factor either way, a median over the sources: {typical(rates):.2f} of "
        f"throughputs, {typical(runs):.2f} of runs. From .. to, "
        f"{RANGE[0]:g} to {RANGE[1]:g} times as long: {inside} lie inside.",
        "## Throughputs",
        table(rates, "images/s"),
        f"The root of the mean square of their errors: a factor of {own:.3f}; of the best shares "
        f"{min(map(deviation, map(logs, SHARES))):.3f}; of each row with the shares that are best "
        f"for the others, {deviation(left_out()):.2f}.",
        "## Whole runs",
        table(runs, "minutes"),
        "By source: " + ", ".join(f"{name} {of:.2f}" for name, of in by_source(runs).items()),
        ABOUT.replace("\n", " ").strip(),
    ]
    print(*parts, sep="\n\n")
    if options.hardware:
        found = {
            "throughputs": [c._asdict() for c in rates],
            "runs": [c._asdict() for c in runs],
        }
        save(f"{options.hardware}-published", found, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
