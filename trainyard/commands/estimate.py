"""`trainyard estimate`: how long a recipe would take on a cluster, by each averager."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard.config import RunConfig
    from trainyard.estimate.forecast import Forecast, Outlook, Pace
    from trainyard.estimate.job import Job
    from trainyard.estimate.network import Cluster, Link

_IMAGENET = 1_281_167


def add(parser: argparse.ArgumentParser) -> None:
    whole, number = _whole, _number
    parser.add_argument("recipe", metavar="RECIPE", help="a built-in name or a path to a TOML file")
    add = parser.add_argument
    add("--gpus", type=_counts, default=[8, 64, 512], metavar="N,N", help="GPUs (8,64,512)")
    add("--step-ms", type=number, metavar="MS", help="a step of one GPU alone, as measured")
    add("--step-images", type=whole, metavar="N", help="images of it (those of the fewest GPUs)")
    add("--run", metavar="DIR", help="take that from a run, instead of --step-ms")
    add("--run-gpus", type=whole, default=1, metavar="N", help="GPUs of that run (1)")
    add("--fixed-ms", type=number, default=10.0, metavar="MS", help="of it whatever the batch (10)")
    add("--gpus-per-node", type=whole, default=8, metavar="N", help="(8)")
    add("--inside", default="nvlink3", metavar="LINK", help="between GPUs of a node (nvlink3)")
    add("--link", default="100gb-ib", metavar="LINK", help="between nodes (100gb-ib)")
    add("--bandwidth", type=number, metavar="GBIT", help="of --link, Gbit/s, if none is like it")
    add("--latency", type=number, metavar="US", help="of --link, microseconds")
    add("--jitter", type=number, default=0.05, metavar="S", help="spread of compute times (0.05)")
    add("--stall-rate", type=number, default=0.0, metavar="P", help="stalls per GPU and step (0)")
    add("--stall-ms", type=number, default=1000.0, metavar="MS", help="of a stall (1000)")
    add("--weak", action="store_true", help="let the batch grow with the GPUs")
    add("--samples", type=whole, default=_IMAGENET, metavar="N", help=f"in an epoch ({_IMAGENET})")
    add("--price-per-gpu-hour", type=number, metavar="X", help="say what a run costs")
    add("--json", action="store_true", help="print as JSON")
    parser.epilog = (
        "LINK is one of 1gbe, 10gbe, 25gbe, 100gbe, 100gb-ib, 200gb-ib, 4x200gb-ib, 8x400gb-ib, "
        "pcie3, pcie4, nvlink2, nvlink3, nvlink4. Any recipe key can be given as --SECTION.KEY "
        "VALUE."
    )
    parser.set_defaults(run_command=estimate, takes_overrides=True)


def estimate(options: argparse.Namespace) -> int:
    from trainyard.config import load_recipe
    from trainyard.estimate.forecast import Task, forecast, job_of
    from trainyard.parts import course_of

    config = load_recipe(options.recipe, options.overrides)
    cluster, pace = _cluster(options), _pace(options, config)
    course, job = course_of(config, options.samples), job_of(config, num_classes=1000)
    task = Task(config.average, course, job, pace)
    fewest = options.gpus[0]
    outlooks = [
        forecast(task, cluster, gpus=gpus, more_batch=gpus / fewest if options.weak else 1.0)
        for gpus in options.gpus
    ]
    if options.json:
        rows = [row for outlook in outlooks for row in _json_rows(outlook, options)]
        print(json.dumps(rows))
        return 0
    _print_assumptions(options.recipe, job, pace, cluster)
    for outlook in outlooks:
        _print_outlook(outlook, options)
    return 0


def _cluster(options: argparse.Namespace) -> "Cluster":
    from trainyard.estimate.jitter import Jitter
    from trainyard.estimate.network import Cluster, Link

    between = _link("--link", options.link)
    latency = between.latency if options.latency is None else options.latency / 1e6
    bandwidth = between.bandwidth if options.bandwidth is None else options.bandwidth * 1e9 / 8
    return Cluster(
        options.gpus_per_node,
        inside=_link("--inside", options.inside),
        between=Link(latency, bandwidth),
        jitter=Jitter(options.jitter, options.stall_rate, options.stall_ms / 1000),
    )


def _link(option: str, name: str) -> "Link":
    from trainyard.errors import InputError
    from trainyard.estimate.network import LINKS

    if name not in LINKS:
        raise InputError(f"{option} {name}: known are {', '.join(LINKS)}")
    return LINKS[name]


def _pace(options: argparse.Namespace, config: "RunConfig") -> "Pace":
    from trainyard.errors import InputError
    from trainyard.estimate.forecast import build_pace, pace_of_run

    fixed = options.fixed_ms / 1000
    if (options.run is None) == (options.step_ms is None):
        raise InputError(
            "how fast is a GPU? Give either --step-ms, the time of a step on one, or --run, the "
            "directory of a run"
        )
    if options.run is not None:
        return pace_of_run(Path(options.run), gpus=options.run_gpus, fixed=fixed)
    return build_pace(
        seconds=options.step_ms / 1000,
        images=options.step_images or math.ceil(config.batch.size / options.gpus[0]),
        fixed=fixed,
        image_size=config.data.image_size,
    )


def _json_rows(outlook: "Outlook", options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for row in outlook.rows:
        average = row.average.model_dump(exclude_none=True)
        about = {"gpus": outlook.gpus, "nodes": outlook.nodes, "average": average}
        if row.step is None:
            rows.append(about | {"reason": row.reason})
            continue
        rows.append(
            about
            | {"step_ms": 1000 * row.step.total}
            | {f"{part}_ms": 1000 * seconds for part, seconds in row.step._asdict().items()}
            | {"efficiency": outlook.ideal / row.seconds, "hours": row.seconds / 3600}
        )
        if options.price_per_gpu_hour is not None:
            rows[-1]["cost"] = _cost(row, outlook, options)
    return rows


def _print_assumptions(recipe: str, job: "Job", pace: "Pace", cluster: "Cluster") -> None:
    from trainyard.commands.printing import size

    def link(link: "Link") -> str:
        return f"{size(link.bandwidth)}/s, {1e6 * link.latency:.3g} us"

    jitter = cluster.jitter
    stalls = f", {1e3 * jitter.stall_seconds:g} ms more in {jitter.stall_rate:g} of them"
    stalls = stalls if jitter.stall_rate else ""
    print(f"{recipe}: {size(job.num_bytes)} to agree on, in {len(job.buckets)} messages")
    print(
        f"one GPU: {pace.images:,} images of {pace.image_size} pixels in {1e3 * pace.seconds:.4g} "
        f"ms, of which {1e3 * pace.fixed:g} ms whatever the number of images"
    )
    print(
        f"nodes of {cluster.gpus_per_node}: {link(cluster.inside)} inside, "
        f"{link(cluster.between)} between; compute times vary by {jitter.sigma:.0%}{stalls}"
    )
    print("Not counted: waiting for data, evaluation, checkpoints.")


def _print_outlook(outlook: "Outlook", options: argparse.Namespace) -> None:
    from trainyard.commands.printing import print_table
    from trainyard.estimate.predict import describe

    has_cost = options.price_per_gpu_hour is not None
    columns = ["average", "ms", "net", "wait", "of ideal", "hours"]
    rows = []
    for row in outlook.rows:
        if row.step is None:
            continue
        cells = [describe(row.average)]
        cells += map(_milliseconds, (row.step.total, row.step.network, row.step.waiting))
        cells += [f"{outlook.ideal / row.seconds:.0%}", _hours(row.seconds / 3600)]
        cells += [_money(_cost(row, outlook, options))] if has_cost else []
        rows.append(cells)
    compute = next(row.step.compute for row in outlook.rows if row.step is not None)
    print(
        f"\n{outlook.gpus:,} GPUs, {outlook.nodes:,} x {outlook.gpus // outlook.nodes}: "
        f"{outlook.images:,} images each, {1000 * compute:,.1f} ms of compute in a step"
    )
    print_table(columns + ["cost"] * has_cost, rows)
    for row in outlook.rows:
        if row.step is None:
            print(f"{describe(row.average)}: {row.reason}")


def _cost(row: "Forecast", outlook: "Outlook", options: argparse.Namespace) -> float:
    price: float = options.price_per_gpu_hour
    return row.seconds / 3600 * outlook.gpus * price


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if amount < 10_000 else f"{amount / 1000:,.1f}k"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 1 else 1}f}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3f}"


def _counts(text: str) -> list[int]:
    return sorted({_whole(part.strip()) for part in text.split(",")})


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return number
