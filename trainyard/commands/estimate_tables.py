"""Output of `trainyard estimate`."""

import argparse
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from trainyard.commands.printing import print_table, print_text, size
from trainyard.config import RunConfig
from trainyard.estimate.estimate import (
    STORAGE_FORMATS,
    UNSURE_COMPUTE,
    UNSURE_DATA,
    UNSURE_MEASURED,
    UNSURE_NETWORK,
    AveragerTime,
    Bound,
    Cluster,
    Estimate,
    Workload,
)
from trainyard.estimate.network import Link, StepTime, describe
from trainyard.hardware import prices_of
from trainyard.image_size import size_text


def print_all(
    options: argparse.Namespace,
    workload: Workload,
    cluster: Cluster,
    estimates: Sequence[Estimate],
    *,
    comparisons: Sequence[Sequence[AveragerTime]],
) -> None:
    """`comparisons`: the averagers for each estimate; empty if not asked for."""
    course, first = workload.course, estimates[0]
    epochs = course.samples(course.num_steps) / course.epoch_samples
    print_text(
        f"{options.recipe}: {_plain(workload.sizes.trained / 1e6, 4)} million weights, "
        f"{_plain(workload.flops / 1e9, 3)} GFLOP to train on an image of "
        f"{size_text(workload.work.image_size)} pixels; {_plain(epochs, 4)} epochs of "
        f"{course.epoch_samples:,} images, {course.num_steps:,} steps"
    )
    _print_estimates(estimates)
    print_text(*_bounds(workload.config, estimates), "")
    print_text(_memory(first), _disk(workload, first), *_assumptions(options, cluster))
    for rows, estimate in zip(comparisons, estimates, strict=True):
        if rows:
            _print_averagers(rows, estimate, cluster)


def _print_estimates(estimates: Sequence[Estimate]) -> None:
    """Print times, then resources, in tables that fit a terminal. Unknown columns are left out."""
    gpus = [f"{each.gpus:,}" for each in estimates]
    _print_columns(
        {
            "GPUs": gpus,
            "time": [_time(each.hours.likely) for each in estimates],
            "from .. to": [_span(each.hours.low, each.hours.high) for each in estimates],
            "images/s": [f"{each.images_per_s:,.0f}" for each in estimates],
            "MFU": [f"{e.utilisation:.0%}" for e in estimates if e.utilisation is not None],
            "bound by": [e.bound if e.fits else "memory: too little" for e in estimates],
        }
    )
    _print_columns(
        {
            "GPUs": gpus,
            "memory each": [size(each.memory.total) for each in estimates],
            "sent a step": [size(each.sent) for each in estimates],
            "kWh": [_amount(each.kwh) for each in estimates if each.kwh is not None],
            "USD": [_amount(each.cost) for each in estimates if each.cost is not None],
        }
    )


def _print_columns(columns: dict[str, list[str]]) -> None:
    columns = {name: cells for name, cells in columns.items() if cells}
    print_table(list(columns), list(zip(*columns.values(), strict=True)))


def _bounds(config: RunConfig, estimates: Sequence[Estimate]) -> list[str]:
    """A line per bottleneck of the runs, and the margin of image loading."""
    counts: dict[str, list[int]] = {}
    for each in estimates:
        what = f"bound by {each.bound}" if each.fits else "too large for the memory"
        change = ", ".join(_advice(config, each))
        counts.setdefault(f"{what}. What would change that: {change}", []).append(each.gpus)
    lines = [f"{_gpus(gpus)}: {line}." for line, gpus in counts.items()]
    if (least := min(each.reserve for each in estimates)) < math.inf:
        lines.append(
            f"Images can be loaded {_plain(least, 2)} times as fast as the GPUs take them."
        )
    return lines


def _memory(estimate: Estimate) -> str:
    memory = estimate.memory
    names = ("weights", "gradients", "moments", "average", "exchange", "context", "activations")
    parts = [f"{name} {size(part)}" for name, part in zip(names, memory, strict=False) if part]
    where = "a GPU" if estimate.gpus == 1 else f"one of {estimate.gpus:,} GPUs"
    line = f"Memory on {where}: {', '.join(parts)}, of {memory.micro:,} images at a time"
    if memory.micro < estimate.share:
        line += f" (of {estimate.share:,} in a step)"
    return line + ("." if memory.largest is None else f"; {memory.largest:,} would fit.")


def _disk(workload: Workload, estimate: Estimate) -> str:
    formats = [f"{size(num_bytes)} {name}" for name, num_bytes in _data_bytes(workload).items()]
    return (
        f"Disk: {size(estimate.checkpoints)} of checkpoints; images of ImageNet's kind: "
        f"{', '.join(formats)}."
    )


def _data_bytes(workload: Workload) -> dict[str, float]:
    """Bytes of the whole data set by storage format."""
    samples = workload.course.epoch_samples + workload.val_samples
    return {name: samples * each.num_bytes for name, each in STORAGE_FORMATS.items()}


def _assumptions(options: argparse.Namespace, cluster: Cluster) -> list[str]:
    network, device, measured = cluster.network, cluster.device, cluster.measured
    jitter = network.jitter
    stalls = f", {1e3 * jitter.stall_seconds:g} ms more in {jitter.stall_rate:g} of them"
    lines = [
        f"Nodes of {network.gpus_per_node}: {_link(network.inside)} inside, "
        f"{_link(network.between)} between; compute times vary by {jitter.sigma:.0%}"
        f"{stalls if jitter.stall_rate else ''}."
    ]
    if measured is not None:
        lines.append(
            f"One GPU, measured: {measured.images:,} images of "
            f"{size_text(measured.image_size)} pixels in {_plain(1e3 * measured.seconds, 4)} ms, "
            f"of which {1e3 * measured.fixed:g} ms whatever the number."
        )
    elif device is not None:
        lines.append(
            f"One GPU, by its data sheet: {device.name}, {size(device.bandwidth)}/s of memory; "
            "not measured: --run or --step-ms would narrow the range."
        )
    if cluster.storage is not None:
        lines.append(
            f"Images: {options.form}, {cluster.storage.images:,.0f} a second on each of "
            f"{cluster.cores_per_gpu} cores per GPU."
        )
    unsure = UNSURE_COMPUTE if measured is None else UNSURE_MEASURED
    lines.append(
        f"From .. to: if compute is {unsure:g}, loading {UNSURE_DATA:g} and the network "
        f"{UNSURE_NETWORK:g} times as fast or as slow."
    )
    return [*lines, *_costs(options, cluster)]


def _costs(options: argparse.Namespace, cluster: Cluster) -> list[str]:
    lines = []
    if cluster.device is not None:
        lines.append(
            f"Energy: {cluster.device.watts:g} W per GPU at its limit, {cluster.host_watts:g} W of "
            f"host beside it, {cluster.overhead:g} times that with cooling."
        )
    if cluster.price_per_hour is not None:
        own = options.price_per_gpu_hour is not None or options.prices is not None
        whose = "yours" if own else f"a round price of {prices_of()}; give yours by --prices"
        lines.append(f"Money: {cluster.price_per_hour:g} USD per GPU and hour ({whose}).")
    return [*lines, "Evaluation is counted; starting, saving and failing are not."]


def _print_averagers(rows: Sequence[AveragerTime], estimate: Estimate, cluster: Cluster) -> None:
    possible = [(row, row.step) for row in rows if row.step is not None]
    waits = any(step.data for _, step in possible)
    price = cluster.price_per_hour
    table = []
    for row, step in possible:
        hours = row.seconds / 3600 + estimate.evaluating
        parts = (step.total, step.network, step.waiting, *[step.data] * waits)
        cells = [describe(row.average), *map(_milliseconds, parts)]
        cells += [f"{row.efficiency:.0%}", _time(hours)]
        cells += [] if price is None else [_amount(hours * estimate.gpus * price)]
        table.append(cells)
    gpus, nodes, compute = estimate.gpus, estimate.nodes, possible[0][1].compute
    print_text(
        f"\n{_gpus([gpus])}, {nodes:,} x {gpus // nodes}: {estimate.share:,} images each, "
        f"{1000 * compute:,.1f} ms of compute in a step"
    )
    columns = ["average", "ms", "net", "wait", *["data"] * waits, "of ideal", "time"]
    print_table(columns + ["USD"] * (price is not None), table)
    for row in rows:
        if row.step is None:
            print_text(f"{describe(row.average)}: {row.reason}")


# --- advice ---


def _advice(config: RunConfig, estimate: Estimate) -> list[str]:
    """Changes that would relieve the bottleneck, the most promising first."""
    changes = _for_speed(config, estimate.bound) if estimate.fits else _for_memory(config, estimate)
    return [change for change, applies in changes.items() if applies]


def _for_memory(config: RunConfig, estimate: Estimate) -> dict[str, bool]:
    model, largest = config.model, estimate.memory.largest
    return {
        f"batch.micro = {largest}": bool(largest),
        'average.name = "sharded" (each GPU keeps a part)': config.average.name != "sharded",
        "model.grad_checkpointing = true": not model.grad_checkpointing,
        "model.ema_cpu = true": model.ema_decay is not None and not model.ema_cpu,
        "a GPU with more memory": True,
    }


def _for_speed(config: RunConfig, bound: Bound) -> dict[str, bool]:
    average, data, model, schedule = config.average, config.data, config.model, config.schedule
    match bound:
        case "kernel launches":
            return {
                'model.compile = "reduce-overhead"': model.compile == "off",
                "a larger batch.size, or fewer GPUs": True,
            }
        case "decoding":
            return {
                "data that `trainyard data pack --format packed` has written": True,
                "more cores per GPU": True,
                'data.decode = "gpu"': data.decode == "cpu",
                "images stored with a short side of 256 pixels": data.repeats == 1,
            }
        case "storage":
            return {
                "data.stage (copies on each node's own disk)": not data.stage,
                "images stored with a short side of 256 pixels": True,
                "faster storage": True,
            }
        case "network":
            bare = average.name == "allreduce" and average.compress is None
            return {
                'average.compress = "bf16"': bare,
                'average.name = "gossip" or "periodic"': average.name in ("allreduce", "sharded"),
                "a larger batch.size, or fewer GPUs": True,
                "a faster network": True,
            }
    precise = config.batch.precision in ("fp32", "tf32")
    return {
        'batch.precision = "bf16" ("fp16" before A100)': precise,
        'model.compile = "default"': model.compile == "off",
        "model.grad_checkpointing = false, if it fits": model.grad_checkpointing,
        "model.channels_last = true": not model.channels_last,
        "smaller images to begin with (data.image_size, schedule.image_size)": (
            not schedule.image_size
        ),
        "more GPUs": True,
    }


# --- as JSON ---


def as_json(
    options: argparse.Namespace,
    workload: Workload,
    cluster: Cluster,
    estimates: Sequence[Estimate],
    *,
    comparisons: Sequence[Sequence[AveragerTime]],
) -> dict[str, Any]:
    """The estimates as data for JSON; seconds, bytes and samples per second."""
    return {
        "recipe": options.recipe,
        "device": None if cluster.device is None else cluster.device._asdict(),
        "is_measured": cluster.measured is not None,
        "weights": round(workload.sizes.trained),
        "training_flops": workload.flops,
        "steps": workload.course.num_steps,
        "price_per_gpu_hour": cluster.price_per_hour,
        "data_bytes": _data_bytes(workload),
        "runs": [
            each._asdict()
            | {
                "memory": each.memory._asdict() | {"total": each.memory.total},
                "hours": each.hours._asdict(),
                "reserve": None if each.reserve == math.inf else each.reserve,
                "step": _in_ms(each.step),
                "advice": _advice(workload.config, each),
                "averagers": [_row_as_json(row, each, cluster) for row in rows],
            }
            for each, rows in zip(estimates, comparisons, strict=True)
        ],
    }


def _row_as_json(row: AveragerTime, estimate: Estimate, cluster: Cluster) -> dict[str, Any]:
    about: dict[str, Any] = {"average": row.average.model_dump(exclude_none=True)}
    if row.step is None:
        return about | {"reason": row.reason}
    hours = row.seconds / 3600 + estimate.evaluating
    about |= {"step_ms": 1000 * row.step.total} | _in_ms(row.step)
    about |= {"efficiency": row.efficiency, "hours": hours}
    if cluster.price_per_hour is not None:
        about["cost"] = hours * estimate.gpus * cluster.price_per_hour
    return about


def _in_ms(step: StepTime) -> dict[str, float]:
    return {f"{part}_ms": 1000 * seconds for part, seconds in step._asdict().items()}


# --- numbers ---


def _gpus(counts: Sequence[int]) -> str:
    return "1 GPU" if list(counts) == [1] else f"{', '.join(f'{n:,}' for n in counts)} GPUs"


def _link(link: Link) -> str:
    return f"{size(link.bandwidth)}/s, {1e6 * link.latency:.3g} us"


def _amount(amount: float) -> str:
    if amount < 100:
        return _plain(amount, 3)
    return f"{amount:,.0f}" if amount < 10_000 else f"{amount / 1000:,.1f}k"


def _plain(number: float, digits: int) -> str:
    """A number rounded to so many digits, without an exponent: 5,800 for 5.8e+03."""
    return f"{Decimal(f'{number:.{digits}g}'):,f}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 1 else 1}f}"


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
