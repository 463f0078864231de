"""`trainyard estimate`: time, memory, network, energy and cost of a run before it starts."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainyard.commands.loading import loading
from trainyard.commands.options import number, positive
from trainyard.files import check_run
from trainyard.hints import did_you_mean

if TYPE_CHECKING:
    from trainyard.config import RunConfig
    from trainyard.estimate.estimate import Cluster, MeasuredThroughput
    from trainyard.estimate.network import Network
    from trainyard.hardware import Accelerator

_IMAGENET = 1_281_167
_VAL_SHARE = 50_000 / _IMAGENET
_COMMON_LINK = "nvlink3"  # inside nodes of unknown GPUs

T = TypeVar("T")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard estimate` to its parser."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a built-in name or a path to a TOML file")
    add("--gpus", type=_counts, metavar="N,N", help="GPUs (1, 8 and 64 nodes, as batches allow)")
    add("--device", metavar="GPU", help="of which kind: a100-sxm-80gb, h100-sxm, …")
    add("--step-ms", type=number, metavar="MS", help="a step of one GPU alone, as measured")
    add("--step-images", type=positive, metavar="N", help="images of it (those of the fewest GPUs)")
    add("--run", metavar="DIR", help="take that from a run, instead of --step-ms")
    add("--fixed-ms", type=number, default=10.0, metavar="MS", help="of it whatever the batch (10)")
    add(
        "--samples",
        type=positive,
        default=_IMAGENET,
        metavar="N",
        help=f"in an epoch ({_IMAGENET})",
    )
    add("--val-samples", type=positive, metavar="N", help="in an evaluation (a 26th of --samples)")
    add("--classes", type=positive, default=1000, metavar="N", help="(1000)")
    add("--weak", action="store_true", help="let the batch grow with the GPUs")
    add("--averagers", action="store_true", help="compare all averagers too")
    add("--json", action="store_true", help="print all there is as JSON")
    _add_node(parser)
    _add_costs(parser)
    parser.epilog = (
        "LINK is one of 1gbe, 10gbe, 25gbe, 100gbe, 100gb-ib, 200gb-ib, 4x200gb-ib, 8x400gb-ib, "
        "pcie3, pcie4, nvlink2, nvlink3, nvlink4, nvlink5. FORM is one of jpeg, jpeg-seek, packed, "
        "jpeg-256, jpeg-256-seek, packed-256, pixels-256, or none for images that are always "
        "there. Any recipe key can be given as --SECTION.KEY VALUE. What all this rests on, and "
        "how far it is off, is in docs/estimate.md."
    )
    parser.set_defaults(run_command=estimate, takes_overrides=True)


def _add_node(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("nodes and network").add_argument
    add("--gpus-per-node", type=positive, default=8, metavar="N", help="(8)")
    add("--cores-per-gpu", type=positive, default=12, metavar="N", help="that load images (12)")
    add("--form", default="jpeg", help="how images are stored (jpeg)")
    add("--storage-gbps", type=number, metavar="GBIT", help="Gbit/s that a node reads (no limit)")
    add("--inside", metavar="LINK", help="between GPUs of a node (that of --device)")
    add("--link", default="100gb-ib", metavar="LINK", help="between nodes (100gb-ib)")
    add("--bandwidth", type=number, metavar="GBIT", help="of --link, Gbit/s, if none is like it")
    add("--latency", type=number, metavar="US", help="of --link, microseconds")
    add("--jitter", type=number, default=0.05, metavar="S", help="spread of compute times (0.05)")
    add("--stall-rate", type=number, default=0.0, metavar="P", help="stalls per GPU and step (0)")
    add("--stall-ms", type=number, default=1000.0, metavar="MS", help="of a stall (1000)")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("energy and money").add_argument
    add("--price-per-gpu-hour", type=number, metavar="X", help="in USD, instead of list prices")
    add("--prices", type=Path, metavar="FILE", help="the same by GPU: a TOML of h100-sxm = 2.99, …")
    add("--host-watts", type=number, default=150.0, metavar="W", help="beside each GPU (150)")
    add("--pue", type=_factor, default=1.2, metavar="F", help="energy for cooling too (1.2)")


def estimate(options: argparse.Namespace) -> int:
    """Run `trainyard estimate`; returns the exit code."""
    from trainyard.config import load_recipe

    if options.run is not None:
        check_run(Path(options.run))
    config = load_recipe(options.recipe, options.overrides)
    from trainyard.commands.estimate_tables import as_json, print_all

    with loading():
        from trainyard.estimate.estimate import (
            build_scenario,
            build_workload,
            compare_averagers,
            estimate_run,
        )

    options.gpus = options.gpus or _usual_gpus(options, config)
    cluster = _cluster(options, config)
    val_samples = options.val_samples or math.ceil(_VAL_SHARE * options.samples)
    workload = build_workload(
        config, samples=options.samples, val_samples=val_samples, num_classes=options.classes
    )
    estimates, comparisons = [], []
    for gpus in options.gpus:
        more_batch = gpus / options.gpus[0] if options.weak else 1.0
        scenario = build_scenario(workload, cluster, gpus=gpus, more_batch=more_batch)
        estimates.append(estimate_run(workload, cluster, scenario))
        has_rows = options.averagers or options.json
        comparisons.append(compare_averagers(scenario, config.average) if has_rows else [])
    if options.json:
        found = as_json(options, workload, cluster, estimates, comparisons=comparisons)
        print(json.dumps(found))
    else:
        print_all(options, workload, cluster, estimates, comparisons=comparisons)
    return 0


def _usual_gpus(options: argparse.Namespace, config: "RunConfig") -> list[int]:
    """GPUs of 1, 8 and 64 nodes, without numbers above the smallest batch; or a single GPU."""
    from trainyard.run.build import build_run_course

    least = min(phase.batch for phase in build_run_course(config, options.samples).phases)
    counts: list[int] = [options.gpus_per_node * nodes for nodes in (1, 8, 64)]
    if options.weak and counts[0] <= least:  # the batch grows with them
        return counts
    return [count for count in counts if count <= least] or [1]


def _cluster(options: argparse.Namespace, config: "RunConfig") -> "Cluster":
    from trainyard.estimate.estimate import STORAGE_FORMATS, Cluster

    key, device = _device(options)
    gbps = options.storage_gbps
    return Cluster(
        network=_network(options, device),
        device=device,
        measured=_measured(options, config, device),
        storage=_choose("--form", options.form, {**STORAGE_FORMATS, "none": None}),
        cores_per_gpu=options.cores_per_gpu,
        node_bytes_per_second=math.inf if gbps is None else gbps * 1e9 / 8,
        price_per_hour=_price(options, key, device),
        host_watts=options.host_watts,
        overhead=options.pue,
    )


def _choose(option: str, name: str, known: dict[str, T]) -> T:
    """An entry by name. InputError that names the others."""
    from trainyard.errors import InputError

    if name not in known:
        hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
        raise InputError(f"{option} {name} is not known{hint}")
    return known[name]


def _device(options: argparse.Namespace) -> tuple[str | None, "Accelerator | None"]:
    """The accelerator by name, or that of the measured run; with its key."""
    from trainyard.estimate.estimate import device_of_run
    from trainyard.hardware import accelerators

    known = accelerators()
    if options.device is not None:
        return options.device, _choose("--device", options.device, known)
    device = None if options.run is None else device_of_run(Path(options.run))
    return next((key for key, each in known.items() if each == device), None), device


def _price(
    options: argparse.Namespace, key: str | None, device: "Accelerator | None"
) -> float | None:
    from trainyard.hardware import read_prices

    prices = {} if options.prices is None else read_prices(options.prices)
    if options.price_per_gpu_hour is not None:
        price: float = options.price_per_gpu_hour
        return price
    if key is None or device is None:
        return None
    return prices.get(key, device.price_per_hour)


def _network(options: argparse.Namespace, device: "Accelerator | None") -> "Network":
    from trainyard.estimate.network import LINKS, Jitter, Link, Network

    inside = options.inside or (_COMMON_LINK if device is None else device.link)
    latency, bandwidth = _choose("--link", options.link, LINKS)
    if options.latency is not None:
        latency = options.latency / 1e6
    if options.bandwidth is not None:
        bandwidth = options.bandwidth * 1e9 / 8
    return Network(
        options.gpus_per_node,
        inside=_choose("--inside", inside, LINKS),
        between=Link(latency, bandwidth),
        jitter=Jitter(options.jitter, options.stall_rate, options.stall_ms / 1000),
    )


def _measured(
    options: argparse.Namespace, config: "RunConfig", device: "Accelerator | None"
) -> "MeasuredThroughput | None":
    """The measured throughput; None if it is to be derived from the data sheet."""
    from trainyard.errors import InputError
    from trainyard.estimate.estimate import MeasuredThroughput, measured_in_run

    fixed = options.fixed_ms / 1000
    if options.run is not None and options.step_ms is not None:
        raise InputError("how fast is a GPU? Give either --step-ms or --run, not both")
    if options.run is not None:
        return measured_in_run(Path(options.run), config, fixed=fixed)
    if options.step_ms is not None:
        return MeasuredThroughput(
            images=options.step_images or math.ceil(config.batch.size / options.gpus[0]),
            seconds=options.step_ms / 1000,
            fixed=fixed,
            image_size=config.data.image_size,
        )
    if device is None:
        raise InputError(
            "how fast is a GPU? Give --device, its kind (a100-sxm-80gb, h100-sxm, …), or what was "
            "measured: --step-ms, the time of a step on one, or --run, the directory of a run"
        )
    return None


def _counts(text: str) -> list[int]:
    return sorted({positive(part.strip()) for part in text.split(",")})


def _factor(text: str) -> float:
    factor = number(text)
    if factor < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return factor
