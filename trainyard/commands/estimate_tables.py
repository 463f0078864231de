"""Output of `trainyard estimate`."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from trainyard.commands.printing import print_table, size
from trainyard.estimate.account import (
    UNSURE_COMPUTE,
    UNSURE_DATA,
    UNSURE_MEASURED,
    UNSURE_NETWORK,
    Account,
    Site,
    Subject,
)
from trainyard.estimate.advice import advice
from trainyard.estimate.forecast import Outlook
from trainyard.estimate.network import Link
from trainyard.estimate.predict import describe
from trainyard.estimate.supply import STORAGES
from trainyard.hardware import prices_of


def print_all(
    options: argparse.Namespace,
    subject: Subject,
    site: Site,
    found: Sequence[Account],
    *,
    outlooks: Sequence[Outlook],
) -> None:
    _print_subject(options.recipe, subject)
    _print_accounts(found)
    for line in _bounds(subject, found):
        print(line)
    print()
    for line in (*_memory(found[0]), _disk(subject, found[0]), *_assumptions(options, site)):
        print(line)
    for outlook, each in zip(outlooks, found, strict=False):
        _print_averagers(outlook, each, site)


def _print_subject(recipe: str, subject: Subject) -> None:
    course = subject.course
    epochs = course.samples(course.num_steps) / course.epoch_samples
    print(
        f"{recipe}: {subject.sizes.trained / 1e6:,.4g} million weights, "
        f"{subject.flops / 1e9:,.3g} GFLOP to train on an image of "
        f"{subject.work.image_size} pixels; {epochs:,.4g} epochs of "
        f"{course.epoch_samples:,} images, {course.num_steps:,} steps"
    )


def _print_accounts(found: Sequence[Account]) -> None:
    """Print times, then resources, in tables that fit a terminal. Unknown columns are left out."""
    gpus = [f"{each.gpus:,}" for each in found]
    _print_columns(
        {
            "GPUs": gpus,
            "time": [_time(each.hours.likely) for each in found],
            "from .. to": [_span(each.hours.low, each.hours.high) for each in found],
            "images/s": [f"{each.images_per_s:,.0f}" for each in found],
            "MFU": [f"{each.utilisation:.0%}" for each in found if each.utilisation is not None],
            "bound by": [each.bound if each.fits else "memory: too little" for each in found],
        }
    )
    _print_columns(
        {
            "GPUs": gpus,
            "memory each": [size(each.memory.total) for each in found],
            "sent a step": [size(each.sent) for each in found],
            "kWh": [_amount(each.kwh) for each in found if each.kwh is not None],
            "USD": [_amount(each.cost) for each in found if each.cost is not None],
        }
    )


def _print_columns(columns: dict[str, list[str]]) -> None:
    columns = {name: cells for name, cells in columns.items() if cells}
    print_table(list(columns), list(zip(*columns.values(), strict=True)))


def _span(low: float, high: float) -> str:
    """4.1 .. 8.1 min, 50 min .. 1.2 h."""
    begin, end = _time(low), _time(high)
    if begin.partition(" ")[2] == end.partition(" ")[2]:
        begin = begin.partition(" ")[0]
    return f"{begin} .. {end}"


def _bounds(subject: Subject, found: Sequence[Account]) -> list[str]:
    """A line per bottleneck of the runs, and the margin of image loading."""
    lines: dict[str, list[int]] = {}
    for each in found:
        what = f"bound by {each.bound}" if each.fits else "too large for the memory"
        change = ", ".join(advice(subject.config, each))
        lines.setdefault(f"{what}. What would change that: {change}", []).append(each.gpus)
    told = [f"{_gpus(gpus)}: {line}." for line, gpus in lines.items()]
    if (least := min(each.reserve for each in found)) < math.inf:
        told.append(f"Images can be loaded {least:.2g} times as fast as the GPUs take them.")
    return told


def _gpus(counts: Sequence[int]) -> str:
    return "1 GPU" if list(counts) == [1] else f"{', '.join(f'{n:,}' for n in counts)} GPUs"


def _memory(each: Account) -> list[str]:
    memory = each.memory
    names = ("weights", "gradients", "moments", "average", "exchange", "context", "activations")
    parts = [f"{name} {size(part)}" for name, part in zip(names, memory, strict=False) if part]
    where = "a GPU" if each.gpus == 1 else f"one of {each.gpus:,} GPUs"
    line = f"Memory on {where}: {', '.join(parts)}, of "
    line += f"{memory.micro:,} images at a time"
    if memory.micro < each.share:
        line += f" (of {each.share:,} in a step)"
    return [line + ("." if memory.largest is None else f"; {memory.largest:,} would fit.")]


def _disk(subject: Subject, each: Account) -> str:
    samples = subject.course.epoch_samples + subject.val_samples
    forms = [f"{size(samples * form.num_bytes)} {name}" for name, form in STORAGES.items()]
    return (
        f"Disk: {size(each.checkpoints)} of checkpoints; images of ImageNet's kind: "
        f"{', '.join(forms)}."
    )


def _assumptions(options: argparse.Namespace, site: Site) -> list[str]:
    cluster, device = site.cluster, site.device
    jitter = cluster.jitter
    stalls = f", {1e3 * jitter.stall_seconds:g} ms more in {jitter.stall_rate:g} of them"
    lines = [
        f"Nodes of {cluster.gpus_per_node}: {_link(cluster.inside)} inside, "
        f"{_link(cluster.between)} between; compute times vary by {jitter.sigma:.0%}"
        f"{stalls if jitter.stall_rate else ''}."
    ]
    if site.pace is not None:
        pace = site.pace
        lines.append(
            f"One GPU, measured: {pace.images:,} images of {pace.image_size} pixels in "
            f"{1e3 * pace.seconds:.4g} ms, of which {1e3 * pace.fixed:g} ms whatever the number."
        )
    elif device is not None:
        lines.append(
            f"One GPU, by its data sheet: {device.name}, {size(device.bandwidth)}/s of memory; "
            "not measured: --run or --step-ms would narrow the range."
        )
    if site.storage is not None:
        lines.append(
            f"Images: {options.form}, {site.storage.images:,.0f} a second on each of "
            f"{site.cores_per_gpu} cores per GPU."
        )
    unsure = UNSURE_COMPUTE if site.pace is None else UNSURE_MEASURED
    lines.append(
        f"From .. to: if compute is {unsure:g}, loading {UNSURE_DATA:g} and the network "
        f"{UNSURE_NETWORK:g} times as fast or as slow."
    )
    return [*lines, *_costs(options, site)]


def _costs(options: argparse.Namespace, site: Site) -> list[str]:
    lines = []
    if site.device is not None:
        lines.append(
            f"Energy: {site.device.watts:g} W per GPU at its limit, {site.host_watts:g} W of host "
            f"beside it, {site.overhead:g} times that with cooling."
        )
    if site.price_per_hour is not None:
        own = options.price_per_gpu_hour is not None or options.prices is not None
        whose = "yours" if own else f"a round price of {prices_of()}; give yours by --prices"
        lines.append(f"Money: {site.price_per_hour:g} USD per GPU and hour ({whose}).")
    return [*lines, "Evaluation is counted; starting, saving and failing are not."]


def _link(link: Link) -> str:
    return f"{size(link.bandwidth)}/s, {1e6 * link.latency:.3g} us"


def _print_averagers(outlook: Outlook, each: Account, site: Site) -> None:
    waits = any(row.step is not None and row.step.data for row in outlook.rows)
    columns = ["average", "ms", "net", "wait", *["data"] * waits, "of ideal", "time"]
    has_cost = site.price_per_hour is not None
    rows = []
    for row in outlook.rows:
        if row.step is None:
            continue
        step, hours = row.step, row.seconds / 3600 + each.evaluating
        cells = [describe(row.average)]
        parts = (step.total, step.network, step.waiting, *[step.data] * waits)
        cells += map(_milliseconds, parts)
        cells += [f"{outlook.ideal / row.seconds:.0%}", _time(hours)]
        cells += [_amount(hours * outlook.gpus * (site.price_per_hour or 0))] if has_cost else []
        rows.append(cells)
    compute = next(row.step.compute for row in outlook.rows if row.step is not None)
    print(
        f"\n{_gpus([outlook.gpus])}, {outlook.nodes:,} x {outlook.gpus // outlook.nodes}: "
        f"{outlook.images:,} images each, {1000 * compute:,.1f} ms of compute in a step"
    )
    print_table(columns + ["USD"] * has_cost, rows)
    for row in outlook.rows:
        if row.step is None:
            print(f"{describe(row.average)}: {row.reason}")


# --- as JSON ---


def as_json(
    options: argparse.Namespace,
    subject: Subject,
    site: Site,
    found: Sequence[Account],
    *,
    outlooks: Sequence[Outlook],
) -> dict[str, Any]:
    samples = subject.course.epoch_samples + subject.val_samples
    return {
        "recipe": options.recipe,
        "device": None if site.device is None else site.device._asdict(),
        "is_measured": site.pace is not None,
        "weights": round(subject.sizes.trained),
        "training_flops": subject.flops,
        "steps": subject.course.num_steps,
        "price_per_gpu_hour": site.price_per_hour,
        "data_bytes": {name: samples * form.num_bytes for name, form in STORAGES.items()},
        "runs": [
            _json_of(subject, each, outlook, site)
            for each, outlook in zip(found, outlooks, strict=True)
        ],
    }


def _json_of(subject: Subject, each: Account, outlook: Outlook, site: Site) -> dict[str, Any]:
    step = each.step
    return each._asdict() | {
        "memory": each.memory._asdict() | {"total": each.memory.total},
        "hours": each.hours._asdict(),
        "reserve": None if each.reserve == math.inf else each.reserve,
        "step": {f"{name}_ms": 1000 * seconds for name, seconds in step._asdict().items()},
        "advice": advice(subject.config, each),
        "averagers": [_json_row(row, outlook, each, site) for row in outlook.rows],
    }


def _json_row(row: Any, outlook: Outlook, each: Account, site: Site) -> dict[str, Any]:
    about: dict[str, Any] = {"average": row.average.model_dump(exclude_none=True)}
    if row.step is None:
        return about | {"reason": row.reason}
    hours = row.seconds / 3600 + each.evaluating
    about |= {"step_ms": 1000 * row.step.total}
    about |= {f"{part}_ms": 1000 * seconds for part, seconds in row.step._asdict().items()}
    about |= {"efficiency": outlook.ideal / row.seconds, "hours": hours}
    if site.price_per_hour is not None:
        about["cost"] = hours * outlook.gpus * site.price_per_hour
    return about


def _amount(amount: float) -> str:
    if amount < 100:
        return f"{amount:,.3g}"
    return f"{amount:,.0f}" if amount < 10_000 else f"{amount / 1000:,.1f}k"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 1 else 1}f}"


def _time(hours: float) -> str:
    """3,200 h, 15.9 h, 5.8 min, 37 s."""
    if hours >= 1:
        return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h"
    return f"{60 * hours:.2g} min" if hours >= 1 / 60 else f"{3600 * hours:.2g} s"
