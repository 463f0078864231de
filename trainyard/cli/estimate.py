"""`trainyard estimate`: hours, memory and cost of a run before it starts."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.arguments import above_zero, number, positive
from trainyard.cli.options import add_json, loading
from trainyard.cli.printing import print_table, print_text
from trainyard.errors import InputError
from trainyard.files import check_run
from trainyard.printable import how_many, in_bytes, in_millions

if TYPE_CHECKING:
    from trainyard.config import RunConfig
    from trainyard.estimate.estimate import Cluster, Estimate, Workload
    from trainyard.hardware import Accelerator

_IMAGENET = 1_281_167  # samples
# Of JPEGs of ImageNet's size: benchmarks/results/2026-11-22-2-core-vm-loader.md, WebDataset.
IMAGES_PER_CORE = 2_462
_CORES = 12


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard estimate` to its parser."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a built-in name or a path to a TOML file")
    add("--device", metavar="GPU", help="kind of GPU: a100-sxm-80gb, h100-sxm, …")
    text = "use the speed of this run of the model, without its waits for data, instead"
    add("--measured", metavar="RUN", help=text)
    add("--samples", type=positive, metavar="N", help=f"images of an epoch ({_IMAGENET})")
    add_json(parser)
    add = parser.add_argument_group("where to train").add_argument
    add("--gpus", type=positive, metavar="N", help="GPUs of each node (8)")
    text = "numbers of nodes to estimate for (1, or the GPUs of --measured)"
    add("--nodes", type=_counts, metavar="N,N", help=text)
    add("--cores", type=positive, metavar="N", help=f"cores that load images for a GPU ({_CORES})")
    add(
        "--images-per-core",
        type=positive,
        metavar="N",
        help="images that a core loads in a second, by `trainyard bench loader` "
        f"({IMAGES_PER_CORE}: JPEGs like ImageNet's)",
    )
    add("--network", type=above_zero, default=100, metavar="GBIT", help="Gbit/s of a node (100)")
    add("--price", type=number, metavar="USD", help="per GPU and hour, instead of a list price")
    parser.epilog = (
        "Any recipe key can be given as --SECTION.KEY VALUE. How far estimates are off is in "
        "docs/estimate.md."
    )
    parser.set_defaults(run_command=estimate, takes_overrides=True)


def estimate(options: argparse.Namespace) -> int:
    """Run `trainyard estimate`; returns the exit code."""
    from trainyard.config import load_recipe
    from trainyard.hardware import named_accelerator

    config = load_recipe(options.recipe, options.overrides)
    if options.measured is not None:
        check_run(Path(options.measured))
    elif options.device is None:
        raise InputError(
            "estimate.no-device",
            "how fast is a GPU? Give --device, its kind (a100-sxm-80gb, h100-sxm, …), or "
            "--measured, the directory of a run of the same model",
        )
    device = None if options.device is None else named_accelerator(options.device)
    with loading():
        from trainyard.estimate.estimate import NODE, build_workload, estimate_run

    cluster = _cluster(options, config, device)
    measured = cluster.measured
    samples = options.samples or (measured.epoch_samples if measured else _IMAGENET)
    workload = build_workload(config, samples)
    least = min(phase.batch for phase in workload.course.phases)
    counts = [nodes * cluster.node for nodes in options.nodes or [1]]
    if options.gpus is options.nodes is None:
        counts = [measured.gpus if measured else NODE if least >= NODE else 1]
    estimates = [estimate_run(workload, cluster, gpus) for gpus in counts]
    if options.json:
        print(json.dumps(_as_json(options, workload, cluster, estimates)))
    else:
        _print(options, workload, cluster, estimates)
    return 0


def _cluster(
    options: argparse.Namespace, config: "RunConfig", device: "Accelerator | None"
) -> "Cluster":
    from trainyard.estimate.estimate import NODE, Cluster, measure_run

    path = options.measured
    measured = None if path is None else measure_run(Path(path), config)
    if measured and measured.device and device not in (None, measured.device):
        raise InputError(
            "estimate.device-differs-from-run",
            "--device {device}: {path} is a run on {name}: leave one of the two out",
            device=options.device,
            path=path,
            name=measured.device.name,
        )
    device = device or (measured.device if measured else None)
    decoding = (options.cores or _CORES) * float(options.images_per_core or IMAGES_PER_CORE)
    if config.data.decode == "gpu":
        decoding = math.inf
    elif measured and measured.loading and not (options.cores or options.images_per_core):
        decoding = measured.loading
    price = options.price
    if price is None and device:
        price = device.price_per_hour
    network, node = 1e9 / 8 * options.network, options.gpus or NODE
    return Cluster(device, measured, decoding, network, price, node)


# --- the output ---


def _print(
    options: argparse.Namespace,
    workload: "Workload",
    cluster: "Cluster",
    estimates: Sequence["Estimate"],
) -> None:
    from trainyard.image_size import size_text

    course = workload.course
    print_text(
        f"{options.recipe}: {in_millions(round(workload.sizes.gradients / 4))} weights, "
        f"{workload.flops / 1e9:,.2f} GFLOP to train on an image of "
        f"{size_text(workload.config.data.image_size)} pixels; "
        f"{course.samples(course.num_steps) / course.epoch_samples:.4g} epochs of "
        f"{course.epoch_samples:,} images, {course.num_steps:,} steps"
    )
    columns = {
        "GPUs": [f"{each.gpus:,}" for each in estimates],
        "time": [_time(each.hours.likely) for each in estimates],
        "from .. to": [_span(each.hours.low, each.hours.high) for each in estimates],
        "images/s": [f"{each.images_per_s:,.0f}" for each in estimates],
        "memory": [in_bytes(each.memory.total) for each in estimates],
        "USD": [f"{each.cost:,.2f}" for each in estimates if each.cost is not None],
        "bound by": [each.bound if each.memory.fits else "too large" for each in estimates],
    }
    columns = {name: cells for name, cells in columns.items() if cells}
    print_table(list(columns), list(zip(*columns.values(), strict=True)))
    print_text(*_details(options, workload, cluster, estimates[0]))


def _details(
    options: argparse.Namespace, workload: "Workload", cluster: "Cluster", estimate: "Estimate"
) -> Iterator[str]:
    from trainyard.estimate.estimate import RANGE
    from trainyard.hardware import prices_of

    gpus, measured = how_many(estimate.gpus, "GPU"), cluster.measured
    yield _memory(estimate)
    reached = "" if estimate.mfu is None else f" {gpus}: {estimate.mfu:.0%} of the peak FLOP/s."
    if measured:
        yield (
            f"Speed: {measured.rate:,.0f} images/s on each of {how_many(measured.gpus, 'GPU')}, "
            f"measured without waits for data.{reached} From .. to: four fifths of its "
            f"{measured.num_reports:,} reports."
        )
    elif cluster.device is not None:
        yield (
            f"Speed: {cluster.device.name} by its data sheet.{reached} From .. to: {RANGE[0]:g} to "
            f"{RANGE[1]:g} times as long, where 20 of 21 published figures lie. A minute of "
            "training, given as --measured, is worth more."
        )
    if estimate.margin is not None:
        yield (
            f"Decoding: {cluster.decoding:,.0f} images/s for each GPU; {gpus}: "
            f"{estimate.margin:.2g} times as fast as they compute."
        )
    if measured and measured.gpus > 1:
        yield "Network: in the measured steps."
    else:
        yield (
            f"Network: {options.network:g} Gbit/s out of a node of {cluster.node}; "
            f"{in_bytes(workload.sizes.gradients)} of gradients."
        )
    if cluster.price_per_hour is not None:
        source = "yours" if options.price is not None else f"a round price of {prices_of()}"
        yield f"Money: {cluster.price_per_hour:g} USD per GPU and hour, {source}."
    yield "Evaluation is counted; starting, saving and failing are not."


def _memory(estimate: "Estimate") -> str:
    memory = estimate.memory
    parts = ", ".join(f"{name} {in_bytes(part)}" for name, part in memory.parts.items() if part)
    gpus = how_many(estimate.gpus, "GPU")
    line = f"Memory, on {gpus}: {parts} of {memory.micro:,} images at a time"
    if memory.micro < estimate.share:
        line += f", of {estimate.share:,} in a step"
    return line + ("." if memory.largest is None else f"; {memory.largest:,} would fit.")


def _as_json(
    options: argparse.Namespace,
    workload: "Workload",
    cluster: "Cluster",
    estimates: Sequence["Estimate"],
) -> dict[str, Any]:
    """The estimates as data for JSON; seconds, bytes and samples per second."""
    return {
        "recipe": options.recipe,
        "device": None if cluster.device is None else cluster.device._asdict(),
        "measured_gpus": None if cluster.measured is None else cluster.measured.gpus,
        "weights": round(workload.sizes.gradients / 4),
        "training_flops": workload.flops,
        "steps": workload.course.num_steps,
        "price_per_gpu_hour": cluster.price_per_hour,
        "runs": [asdict(each) | {"fits": each.memory.fits} for each in estimates],
    }


# --- numbers ---


def _counts(text: str) -> list[int]:
    return sorted({positive(part.strip()) for part in text.split(",")})


def _time(hours: float) -> str:
    """3,200 h, 15.9 h, 5.8 min, 37 s."""
    if hours >= 1:
        return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h"
    return f"{60 * hours:.2g} min" if hours >= 1 / 60 else f"{3600 * hours:.2g} s"


def _span(low: float, high: float) -> str:
    """4.1 .. 8.1 min, 50 min .. 1.2 h."""
    begin, end = _time(low), _time(high)
    if begin.partition(" ")[2] == end.partition(" ")[2]:
        begin = begin.partition(" ")[0]
    return f"{begin} .. {end}"
