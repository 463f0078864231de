"""What `trainyard estimate` says of runs and throughputs that others have published.

python -m benchmarks.published [--hardware NAME]

Nobody else's run is used as a whole to set anything. The three efficiencies of trainyard/estimate/
compute.py are those of a grid that come nearest to the throughputs; each of these is also
estimated with the efficiencies that the others alone would have given (leave one out).
"""

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from benchmarks.saving import save
from trainyard.config import load_recipe
from trainyard.estimate.compute import Efficiency, Roofline, TrainingWork, trace_training
from trainyard.estimate.estimate import Cluster, build_scenario, build_workload, estimate_run
from trainyard.estimate.network import LINKS, Network
from trainyard.hardware import accelerators

IMAGENET, VALIDATION = 1_281_167, 50_000


class Throughput(NamedTuple):
    """Images per second of one GPU in training, 224 pixels, half precision."""

    source: str
    model: str
    device: str
    published: float
    images: int  # at a time
    compiled: bool = False


THROUGHPUTS = (
    Throughput("DeepLearningExamples, 1 GPU", "resnet50", "a100-sxm-80gb", 2470, 256),
    Throughput("MLPerf v3.0, Dell, 8 GPUs", "resnet50", "a100-sxm-80gb", 3552, 400),
    Throughput("MLPerf v4.0, 8 GPUs", "resnet50", "h100-sxm", 7160, 400),
    Throughput("MLPerf v4.0, 8 GPUs", "resnet50", "h200", 7940, 400),
    Throughput("timm's table", "resnet50", "rtx-3090", 1218, 256),
    Throughput("timm's table", "vit_base_patch16_224", "rtx-3090", 393, 128),
    Throughput("timm's table", "convnext_base", "rtx-3090", 339, 128),
    Throughput("timm's table", "convnext_tiny", "rtx-3090", 819, 256),
    Throughput("NeMo, 8 GPUs", "vit_giant_patch14_224", "a100-sxm-80gb", 87, 64),
    Throughput("NeMo, 8 GPUs", "vit_giant_patch14_224", "h100-sxm", 179, 64),
)
GRID = tuple(
    Efficiency(matrix / 20, convolution / 20, bandwidth / 20)
    for matrix, convolution, bandwidth in product(range(8, 19), repeat=3)
)


class Run(NamedTuple):
    source: str
    recipe: str
    device: str
    gpus: int
    hours: float
    keys: tuple[tuple[str, str], ...] = ()


FP16 = ("batch.precision", "fp16")
PLAIN = (FP16, ("batch.size", "2048"))
RUNS = (
    Run("FFCV", "resnet50-16ep", "a100-sxm-40gb", 8, 14.9 / 60),
    Run("FFCV", "resnet50-24ep", "a100-sxm-40gb", 8, 21.7 / 60),
    Run("FFCV", "resnet50-32ep", "a100-sxm-40gb", 8, 28.7 / 60),
    Run("FFCV", "resnet50-40ep", "a100-sxm-40gb", 8, 35.6 / 60),
    Run("FFCV", "resnet50-88ep", "a100-sxm-40gb", 8, 77.2 / 60),
    Run(
        "Composer, if all at 224 pixels",
        "resnet50-step",
        "a100-sxm-80gb",
        8,
        23.79 / 60,
        (*PLAIN, ("run.length", "27 epochs"), ("run.eval_every", "4 epochs")),
    ),
    Run(
        "Composer, if all at 176 pixels",
        "resnet50-step",
        "a100-sxm-80gb",
        8,
        23.79 / 60,
        (
            *PLAIN,
            ("run.length", "27 epochs"),
            ("run.eval_every", "4 epochs"),
            ("data.image_size", "176"),
            ("data.eval_size", "224"),
        ),
    ),
    Run(
        "DeepLearningExamples, 90 epochs",
        "resnet50-step",
        "a100-sxm-80gb",
        8,
        90 * IMAGENET / 16_621 / 3600,
        (*PLAIN, ("run.length", "90 epochs")),
    ),
    Run("system D, ViT-B/32", "vit-b32-lamb-32k", "a100-sxm-40gb", 4, 14.58, (FP16,)),
    Run("system D, ViT-B/16", "vit-b16-lamb-32k", "a100-sxm-40gb", 4, 78.58, (FP16,)),
    Run("system D, ViT-L/32", "vit-l32-lamb-32k", "a100-sxm-40gb", 4, 37.83, (FP16,)),
)


class Cell(NamedTuple):
    source: str
    what: str
    where: str
    published: float
    estimated: float
    left_out: float = math.nan  # as estimated without this one

    @property
    def error(self) -> float:
        return self.estimated / self.published - 1


# --- throughputs ---


@cache
def work_of(model: str) -> TrainingWork:
    import timm
    import torch

    with torch.device("meta"):
        built = timm.create_model(model).to(memory_format=torch.channels_last)
    return trace_training(built.train(), 224, torch.float16)


def images_per_s(of: Throughput, efficiency: Efficiency) -> float:
    device = accelerators()[of.device]
    work = work_of(of.model)
    gpu = Roofline(work, device, "fp16", of.images, 0.0, of.compiled, efficiency)
    return of.images / gpu.compute(of.images, 224)


@cache
def logs(efficiency: Efficiency) -> tuple[float, ...]:
    return tuple(math.log(images_per_s(of, efficiency) / of.published) for of in THROUGHPUTS)


def best(without: int | None = None) -> Efficiency:
    """The least squares of the logarithms' errors."""
    rows = [number for number in range(len(THROUGHPUTS)) if number != without]
    return min(GRID, key=lambda each: sum(logs(each)[row] ** 2 for row in rows))


def throughputs() -> list[Cell]:
    return [
        Cell(
            of.source,
            of.model,
            of.device,
            of.published,
            images_per_s(of, Efficiency()),
            images_per_s(of, best(without=number)),
        )
        for number, of in enumerate(THROUGHPUTS)
    ]


# --- whole runs ---


def runs() -> list[Cell]:
    return [
        Cell(run.source, run.recipe, f"{run.gpus} {run.device}", run.hours, hours_of(run))
        for run in RUNS
    ]


def hours_of(run: Run) -> float:
    """With data that are always there: what others' loaders can do is not known."""
    config = load_recipe(run.recipe, dict(run.keys))
    workload = build_workload(config, samples=IMAGENET, val_samples=VALIDATION, num_classes=1000)
    device = accelerators()[run.device]
    cluster = Cluster(Network(8, LINKS[device.link]), device)
    scenario = build_scenario(workload, cluster, gpus=run.gpus)
    return estimate_run(workload, cluster, scenario).hours.likely


# --- tables ---

ABOUT_RUNS = """
Our recipes after theirs; data always there, evaluation counted. FFCV's images were in memory.
Composer's grew in the course of the run, to sizes that the source at hand does not say: two are
tried. DeepLearningExamples' hours are those of its throughput on 8 GPUs, which is 6.7 times that
on one: its loader. System D's server is "not a standard DGX" with A100 of whichever kind; on its
4 GPUs the loader gave 7,320 images/s at least, so that neither ViT-B/16 (1,360) nor ViT-L/32
(2,820) waited for it, and ViT-B/32 may have.
"""


def typical(errors: Iterable[float]) -> float:
    """The root of the mean square of logarithms, as a factor less one."""
    return math.exp(math.sqrt(statistics.mean(math.log(1 + e) ** 2 for e in errors))) - 1


def throughput_table(cells: Sequence[Cell]) -> str:
    lines = [
        "| source | model | GPU | published, images/s | estimated | error | left out |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {cell.source} | {cell.what} | {cell.where} | {cell.published:,.0f} "
        f"| {cell.estimated:,.0f} | {cell.error:+.0%} | {cell.left_out / cell.published - 1:+.0%} |"
        for cell in cells
    ]
    return "\n".join(lines)


def run_table(cells: Sequence[Cell]) -> str:
    lines = [
        "| source | recipe | GPUs | published, h | estimated, h | error |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {cell.source} | {cell.what} | {cell.where} | {cell.published:.3g} "
        f"| {cell.estimated:.3g} | {cell.error:+.0%} |"
        for cell in cells
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-published.json and .md")
    options = parser.parse_args()
    rates, hours = throughputs(), runs()
    parts = [
        "# What `trainyard estimate` says of published runs",
        "## Throughputs",
        f"Of a grid, {best()} comes nearest to them.",
        throughput_table(rates),
        f"Typical error: a factor of {1 + typical(cell.error for cell in rates):.2f}; left out, of "
        f"{1 + typical(cell.left_out / cell.published - 1 for cell in rates):.2f}.",
        "## Whole runs",
        run_table(hours),
        ABOUT_RUNS.replace("\n", " ").strip(),
    ]
    print(*parts, sep="\n\n")
    if options.hardware:
        figures = {
            name: [cell._asdict() | {"error": cell.error} for cell in cells]
            for name, cells in {"throughputs": rates, "runs": hours}.items()
        }
        save(f"{options.hardware}-published", figures, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
