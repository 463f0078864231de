"""Hours, memory and money of a run before it starts, and what bounds it.

A GPU reaches shares of its data sheet that were fitted to published throughputs (docs/estimate.md),
or what a run of the same model measured.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
import torch

from trainyard.averaging.config import DEFAULT_EVERY, AverageConfig
from trainyard.compare import differences
from trainyard.config import RunConfig, load_recipe
from trainyard.course import Course
from trainyard.errors import InputError
from trainyard.estimate.memory import Memory, Sizes, gpu_memory, kept_bytes, model_sizes
from trainyard.files import RunDirectory, read_json
from trainyard.hardware import Accelerator, find_accelerator
from trainyard.image_size import ImageSize, num_pixels
from trainyard.model.flops import flops_by_operation
from trainyard.monitor.history import number, read_history
from trainyard.monitor.reports import Report
from trainyard.run.build import build_mode, build_run_course
from trainyard.run.model import build_run_model

# Shares of the peak FLOP/s that matrix products and convolutions reach, and how often each byte of
# an activation moves: fitted by benchmarks/published.py.
MATRIX, CONVOLUTION, MOVES = 0.65, 0.9, 10.25
RANGE = 0.8, 2.0
"""Ends of the range by a data sheet, over the likely hours: 20 of 21 published rows lie inside."""

_FUSED = 0.75  # share of those moves that torch.compile leaves; from one published figure
_LAUNCH = 5e-6  # seconds in which PyTorch launches a kernel; a layer has three in a step
_SPREAD = 0.05  # standard deviation of compute times among GPUs, as a share; assumed
NODE = 8
"""GPUs of a node, unless said otherwise."""
_VAL_SHARE = 50_000 / 1_281_167  # of the samples of an epoch: ImageNet's

_DECIDING = (
    *("model.name", "model.options", "model.freeze", "model.grad_checkpointing"),
    *("model.compile", "model.channels_last", "data.channels", "batch.precision"),
)
"""Keys that decide the time of a step of so many images of a size, on one GPU."""
_EXCHANGE = (
    *("batch.size", "average.name", "average.compress", "average.topology"),
    *("average.overlap", "average.every", "average.batch_norm"),
)
"""Keys that decide it on several GPUs, too."""
_OF_RATE = ("world_size", "samples", "epoch", "images_per_s")  # of a report, without which no rate

Bound = Literal["arithmetic", "bandwidth", "launches", "GPU", "decoding", "network"]
"""The longest part of a run: FLOPs, traffic to and from a GPU's memory, launches of kernels, a
measured GPU, decoding on the cores, or what GPUs wait for each other.
"""


class Workload(NamedTuple):
    """The training to estimate. FLOPs, two for a multiply-add, are of an image's training."""

    config: RunConfig
    course: Course
    sizes: Sizes
    flops: float  # without recomputed activations, as a run's own mfu counts them
    matrix: float  # FLOPs of matrix products
    convolution: float  # FLOPs of convolutions
    moved: float  # bytes of the activations that an image's training reads, kept or recomputed
    kept: tuple[float, float]  # bytes of those that are kept, per image and besides
    layers: int


def build_workload(config: RunConfig, samples: int) -> Workload:
    """The training of a recipe on so many samples an epoch, with a model that takes no memory.

    RecipeError if there is no such model, or if it cannot be trained as the recipe says.
    """
    with torch.device("meta"):
        model = build_run_model(config, num_classes=1000).train()
    mode = build_mode(config, model, torch.device("cuda")).name
    config = config.model_copy(update={"model": config.model.model_copy(update={"compile": mode})})
    sizes, kept = model_sizes(model, config), kept_bytes(model, config)
    if config.model.grad_checkpointing:
        model.set_grad_checkpointing(False)  # type: ignore[operator]
    all_bytes, _ = kept_bytes(model.requires_grad_(True), config)
    flops = flops_by_operation(model, config.data.image_size, config.data.channels)
    convolution = sum(count for name, count in flops.items() if "convolution" in name)
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    # A forward pass, a backward pass twice as long through what is trained, and a recomputed one.
    passes = 1 + (2 + config.model.grad_checkpointing) * sizes.gradients / weights
    return Workload(
        config=config,
        course=build_run_course(config, samples),
        sizes=sizes,
        flops=3.0 * sum(flops.values()),
        matrix=passes * (sum(flops.values()) - convolution),
        convolution=passes * convolution,
        moved=passes / 3 * all_bytes,
        kept=kept,
        layers=sum(not list(module.children()) for module in model.modules()),
    )


class Measured(NamedTuple):
    """What the reports of a run measured; rates in images per second and GPU."""

    folder: Path
    gpus: int
    device: Accelerator | None
    epoch_samples: int
    image_size: ImageSize
    num_reports: int
    slow: float  # a tenth of the reports are slower
    rate: float  # the median, without waits for data
    fast: float  # a tenth of the reports are faster
    loading: float | None  # what the loader could give; None if not known


def measure_run(folder: Path, config: RunConfig) -> Measured:
    """The throughput of a run of the same model.

    It is that of the reports but the first, while batch, image size and GPUs stay the same.
    InputError if there are too few reports, or if keys differ on which the time of a step depends.
    """
    directory = RunDirectory(folder)
    try:
        reports = [r for r in read_history(directory.metrics).train if _has_rate(r)]
        of_run = load_recipe(str(directory.recipe))
    except InputError as error:
        raise InputError(
            "estimate.not-a-run",
            "{path} is no run directory: {error}",
            path=folder,
            error=str(error),
        ) from None
    gpus = reports[-1]["world_size"] if reports else 1
    keys = (*_DECIDING, *(_EXCHANGE if gpus > 1 else ()))
    if changed := differences(of_run, config, keys):
        raise InputError(
            "estimate.recipe-differs",
            "--measured {path}: its steps are not those of this recipe ({changes}): give a run of "
            "the same model, or --device",
            path=folder,
            changes="; ".join(changed),
        )
    if reports:
        samples = round(reports[0]["samples"] / reports[0]["epoch"])
        end = build_run_course(of_run, samples).phases[0].stop
        reports = [r for r in reports[1:] if r["step"] <= end and r["world_size"] == gpus]
    if not reports:
        raise InputError(
            "estimate.too-few-reports",
            "{path}: has no second report of training to go by",
            path=directory.metrics,
        )
    rates = [r["images_per_s"] / (1 - (number(r, "data_wait") or 0.0)) / gpus for r in reports]
    loading = [rate / gpus for r in reports if (rate := number(r, "images_per_s_loader"))]
    slow, rate, fast = np.quantile(rates, [0.1, 0.5, 0.9]).tolist()
    return Measured(
        *(folder, gpus, _device_of(directory), samples, of_run.data.image_size),
        *(len(reports), slow, rate, fast, float(np.median(loading)) if loading else None),
    )


def _has_rate(report: Report) -> bool:
    rates = [number(report, key) or 0.0 for key in _OF_RATE]
    return min(rates) > 0 and (number(report, "data_wait") or 0.0) < 1


def _device_of(run: RunDirectory) -> Accelerator | None:
    """The GPU of a run; None if it is not known."""
    try:
        return find_accelerator(str(read_json(run.environment)["devices"][0]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


class Cluster(NamedTuple):
    """GPUs, in nodes, and what feeds and connects them."""

    device: Accelerator | None  # None if only its throughput is known
    measured: Measured | None  # None to use the data sheet
    decoding: float  # images per second and GPU
    network: float  # bytes per second out of a node
    price_per_hour: float | None  # per GPU
    node: int = NODE  # GPUs


# --- the parts of a step ---


def image_seconds(workload: Workload, cluster: Cluster) -> tuple[float, float]:
    """Seconds of an image on one GPU: arithmetic, and traffic to and from the GPU's memory.

    Of a measured run all of it counts as arithmetic. InputError if the GPU has no units for the
    precision.
    """
    config, device = workload.config, cluster.device
    if measured := cluster.measured:
        return _area(config.data.image_size, measured.image_size) / measured.rate, 0.0
    assert device is not None  # a cluster has a device or a measured run
    peak = peak_flops(device, config.batch.precision)
    moves = MOVES * (_FUSED if config.model.compile != "off" else 1)
    arithmetic = (workload.matrix / MATRIX + workload.convolution / CONVOLUTION) / peak
    return arithmetic, moves * workload.moved / device.bandwidth


def peak_flops(device: Accelerator, precision: str) -> float:
    """Dense FLOP/s. InputError if the device lacks units for a 16-bit precision."""
    if precision == "tf32" and "tf32" not in device.peak:
        precision = "fp32"
    if precision not in device.peak:
        others = [name for name in ("fp16", "bf16") if name in device.peak]
        raise InputError(
            "estimate.unsupported-precision",
            "batch.precision = {value!r}: {name} has no units for it: set --batch.precision "
            "{other}",
            value=precision,
            name=device.name,
            other=others[0],
        )
    return device.peak[precision]


def network_seconds(
    average: AverageConfig,
    num_bytes: float,
    gpus: int,
    *,
    compute: float,
    bandwidth: float,
    node: int = NODE,
) -> float:
    """Seconds of a step in which GPUs wait for messages, and for the slowest of them.

    `num_bytes`: of the gradients. `bandwidth`: bytes per second out of a GPU, or out of a node. A
    ring sends each byte nearly twice; latencies are left out. The backward pass hides an
    all-reduce, both passes hide the messages of sharded weights, and a whole step hides gossip,
    whose messages are taken to go to one peer. An averager of the user's own counts as all-reduce.
    """
    if gpus == 1:
        return 0.0
    sent = num_bytes / (2 if average.compress else 1) / bandwidth
    ring = 2 * (gpus - 1) / gpus * sent
    # The expected maximum of so many normal numbers (Blom 1958).
    slowest = compute * _SPREAD * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))
    match average.name:
        case "sharded":
            return slowest + max(1.5 * ring - compute, 0)
        case "periodic":
            return ring / (average.every or DEFAULT_EVERY)
        case "gossip":
            flows = node if gpus > node else 1  # GPUs of a node that share its link
            return max(flows * sent - (0 if average.overlap is False else compute), 0)
        case _:
            return slowest + max(ring - 2 / 3 * compute, 0)


# --- the estimate ---


@dataclass(frozen=True)
class Range:
    low: float
    likely: float
    high: float


@dataclass(frozen=True)
class Step:
    """Mean seconds of a step, by part."""

    compute: float
    network: float  # not hidden behind compute
    data: float  # waiting for data


@dataclass(frozen=True)
class Estimate:
    """The estimate for one number of GPUs, in bytes, hours and USD."""

    gpus: int
    share: int  # images per step and GPU at the start of the run
    memory: Memory
    hours: Range
    images_per_s: float  # of all GPUs, in training
    mfu: float | None  # share of the GPUs' peak; None if not known
    bound: Bound
    margin: float | None  # images that can be decoded over those that the GPUs take
    step: Step
    cost: float | None


def estimate_run(workload: Workload, cluster: Cluster, gpus: int) -> Estimate:
    """The estimate for `gpus` GPUs.

    InputError if a batch is too small for them, if the GPU has no units for the precision, or if a
    run on another number of several GPUs was measured.
    """
    course, device, price = workload.course, cluster.device, cluster.price_per_hour
    _check(course, cluster.measured, gpus)
    share = math.ceil(course.phases[0].batch / gpus)
    memory = gpu_memory(
        *(workload.sizes, workload.kept, workload.config),
        gpus=gpus,
        share=share,
        capacity=None if device is None else device.memory,
    )
    step, bound = _mean_step(workload, cluster, gpus=gpus, micro=memory.micro)
    busy = course.num_steps * (step.compute + step.network)
    training = busy + course.num_steps * step.data
    likely = (training + _evaluation(workload, cluster, gpus)) / 3600
    low, high = RANGE
    if measured := cluster.measured:
        low, high = measured.rate / measured.fast, measured.rate / measured.slow
    samples, decoding = course.samples(course.num_steps), gpus * cluster.decoding
    return Estimate(
        gpus=gpus,
        share=share,
        memory=memory,
        hours=Range(low * likely, likely, high * likely),
        images_per_s=samples / training,
        mfu=None if device is None else _ideal_seconds(workload, device) / gpus / training,
        bound=bound,
        margin=None if decoding == math.inf else decoding * busy / samples,
        step=step,
        cost=None if price is None else likely * gpus * price,
    )


def _check(course: Course, measured: Measured | None, gpus: int) -> None:
    if (least := min(phase.batch for phase in course.phases)) < gpus:
        raise InputError(
            "estimate.batch-too-small",
            "a batch of {batch:,} is not enough for {num_gpus:,} GPUs: raise --batch.size",
            batch=least,
            num_gpus=gpus,
        )
    if measured and measured.gpus not in (1, gpus):
        raise InputError(
            "estimate.gpus-differ",
            "--measured {path}: its {num_gpus} GPUs waited for each other, which no other number "
            "does alike: leave --gpus and --nodes out, or give a run on one GPU",
            path=measured.folder,
            num_gpus=measured.gpus,
        )


def _mean_step(
    workload: Workload, cluster: Cluster, *, gpus: int, micro: int
) -> tuple[Step, Bound]:
    config, course = workload.config, workload.course
    arithmetic, traffic = image_seconds(workload, cluster)
    launch = 3 * _LAUNCH * workload.layers if config.model.compile == "off" else 0.0
    links = [] if cluster.device is None else [cluster.device.link]
    links += [cluster.network] if gpus > cluster.node else []
    total, launching = np.zeros(3), 0.0
    for phase in course.phases:
        share = math.ceil(phase.batch / gpus)
        area = _area(phase.image_size, config.data.image_size)
        launches = math.ceil(share / micro) * launch
        compute = max(share * area * (arithmetic + traffic), launches)
        network = 0.0  # of a run on several GPUs: measured with the rest
        if cluster.measured is None or cluster.measured.gpus == 1:
            network = network_seconds(
                *(config.average, workload.sizes.gradients, gpus),
                compute=compute,
                bandwidth=min(links, default=math.inf),
                node=cluster.node,
            )
        loading = phase.batch / (gpus * cluster.decoding)  # while a step computes
        steps = phase.stop - phase.start
        total += steps * np.array([compute, network, max(loading - compute - network, 0.0)])
        launching += steps * launches
    step = Step(*(total / course.num_steps).tolist())
    computing: Bound = "arithmetic" if arithmetic > traffic else "bandwidth"
    if cluster.measured:
        computing = "GPU"
    if launching / course.num_steps >= step.compute:
        computing = "launches"
    if step.data > 0:
        return step, "decoding"
    return step, "network" if step.network > step.compute else computing


def _evaluation(workload: Workload, cluster: Cluster, gpus: int) -> float:
    """Seconds of all evaluations of a run, whose forward pass takes a third of training."""
    config, course = workload.config, workload.course
    times = max(course.every(config.run.eval_every).times(course.num_steps), 1)
    images = times * math.ceil(_VAL_SHARE * course.epoch_samples) / gpus
    area = _area(config.data.eval_size or config.data.image_size, config.data.image_size)
    forward = area * sum(image_seconds(workload, cluster)) / 3
    return images * max((1 + len(config.model.averages)) * forward, 1 / cluster.decoding)


def _ideal_seconds(workload: Workload, device: Accelerator) -> float:
    """Seconds of a training on one GPU that reaches its peak."""
    size, phases = workload.config.data.image_size, workload.course.phases
    images = sum((p.stop - p.start) * p.batch * _area(p.image_size, size) for p in phases)
    return images * workload.flops / peak_flops(device, workload.config.batch.precision)


def _area(size: ImageSize, other: ImageSize) -> float:
    return num_pixels(size) / num_pixels(other)
