"""Estimate of a run: time, memory, disk, network, energy, money, and its bottleneck."""

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from trainyard.averaging.config import AverageConfig
from trainyard.averaging.topology import BUILT_IN
from trainyard.compare import differences
from trainyard.config import RunConfig, load_recipe
from trainyard.course import Course
from trainyard.errors import InputError, RecipeError
from trainyard.estimate.memory import (
    Memory,
    Sizes,
    checkpoint_bytes,
    gpu_memory,
    model_sizes,
    update_bytes,
)
from trainyard.estimate.network import (
    Buckets,
    Network,
    StepTime,
    build_buckets,
    sent_bytes,
    step_time,
    total_bytes,
)
from trainyard.files import RunDirectory
from trainyard.hardware import Accelerator, find_accelerator
from trainyard.image_size import ImageSize, num_pixels
from trainyard.monitor.history import read_history

if TYPE_CHECKING:
    from trainyard.estimate.compute import Roofline, TrainingWork

# Possible errors of each part, as a factor either way. Compute from a data sheet: the errors in
# docs/estimate.md; measured compute: those of the averagers in docs/averaging.md. Cores differ from
# the one on which decoding was measured, and networks from their line rate.
UNSURE_COMPUTE, UNSURE_MEASURED, UNSURE_DATA, UNSURE_NETWORK = 1.4, 1.1, 1.5, 1.4
_BUSY, _IDLE = 0.8, 0.3  # power as a share of a GPU's limit, computing and waiting; assumed

Bound = Literal[
    "arithmetic", "memory traffic", "kernel launches", "device", "decoding", "storage", "network"
]

_CONTENDERS = (
    AverageConfig(),
    *(AverageConfig(name="gossip", topology=topology) for topology in BUILT_IN),
    AverageConfig(name="periodic"),
    AverageConfig(name="sharded"),
)


# --- a GPU's throughput, measured ---


@dataclass(frozen=True)
class MeasuredThroughput:
    """Measured time of one GPU's step, without other GPUs: forward, backward and update."""

    images: int
    seconds: float
    fixed: float
    """Seconds that do not depend on the images: the update, the launches of kernels."""
    image_size: ImageSize

    def __post_init__(self) -> None:
        if self.fixed >= self.seconds:
            raise InputError(
                f"--fixed-ms {1000 * self.fixed:g} is no part of a step of "
                f"{1000 * self.seconds:.4g} ms: give less, or the time of a step of more images"
            )

    def compute(self, images: int, image_size: ImageSize) -> float:
        """Seconds of a step for another number of images, of another size."""
        area = num_pixels(image_size) / num_pixels(self.image_size)
        return self.fixed + (self.seconds - self.fixed) * area * images / self.images

    def bound(self, images: int) -> Literal["device"]:
        return "device"


_PACE = (
    *("model.name", "model.options", "model.freeze", "model.grad_checkpointing"),
    *("model.compile", "model.channels_last", "data.channels", "batch.precision"),
)
"""Keys that decide the time of a step of so many images of a size."""


def measured_in_run(folder: Path, config: RunConfig, *, fixed: float) -> MeasuredThroughput:
    """The throughput of one GPU of a run of the same model, without its waits for data.

    It is the median of the reports but the first, while batch, image size and ranks stay the same.
    InputError if there are too few reports, or if keys differ on which the time of a step depends.
    """
    from trainyard.run.build import build_run_course

    directory = RunDirectory(folder)
    try:
        reports = read_history(directory.metrics).train
        of_run = load_recipe(str(directory.recipe))
    except InputError as error:
        raise InputError(f"{folder} is no run directory: {error}") from None
    if changed := differences(of_run, config, _PACE):
        raise InputError(
            f"--run {folder}: its steps are not those of this recipe ({'; '.join(changed)}): "
            "give a run of the same model, --step-ms or --device"
        )
    if reports:
        course = build_run_course(of_run, round(reports[0]["samples"] / reports[0]["epoch"]))
        ranks = reports[-1]["world_size"]
        reports = [
            line
            for line in reports[1:]
            if line["step"] <= course.phases[0].stop and line["world_size"] == ranks
        ]
    if not reports:
        raise InputError(f"{directory.metrics}: has no second report of training to go by")
    rate = statistics.median(line["images_per_s"] / (1 - line["data_wait"]) for line in reports)
    batch, size = of_run.batch.size, of_run.data.image_size
    return MeasuredThroughput(math.ceil(batch / ranks), batch / rate, fixed, size)


def device_of_run(folder: Path) -> Accelerator | None:
    """The GPU of a run, if it is known; None if the folder is no run directory."""
    try:
        environment = json.loads(RunDirectory(folder).environment.read_text())
        return find_accelerator(environment["devices"][0])
    except (OSError, ValueError, LookupError):
        return None


# --- data ---


class StorageFormat(NamedTuple):
    """A storage format of images."""

    images: float  # per second and core: read, decoded and cropped
    num_bytes: float  # per image


# Speed of whole loaders on one core, and bytes per image: ImageNet-like files of 110 kB, and the
# same shrunk to a short side of 256 pixels. benchmarks/results/2026-11-22-2-core-vm-loader.md
STORAGE_FORMATS = {
    "jpeg": StorageFormat(2_462, 114e3),  # as WebDataset; a folder of files is 11% slower
    "jpeg-seek": StorageFormat(3_115, 115e3),
    "packed": StorageFormat(6_717, 230e3),
    "jpeg-256": StorageFormat(6_256, 33e3),
    "jpeg-256-seek": StorageFormat(7_026, 34e3),
    "packed-256": StorageFormat(11_625, 65e3),
    "pixels-256": StorageFormat(13_455, 257e3),
}


class DataThroughput(NamedTuple):
    """Images per second that a node decodes, and reads from its disks or network."""

    decoding: float = math.inf
    reading: float = math.inf

    @property
    def images(self) -> float:
        return min(self.decoding, self.reading)

    @property
    def bound(self) -> Literal["decoding", "storage"]:
        return "decoding" if self.decoding <= self.reading else "storage"


# --- the training, and the hardware ---


@dataclass(frozen=True)
class Workload:
    """The training to estimate."""

    config: RunConfig
    course: Course
    work: "TrainingWork"
    sizes: Sizes
    buckets: Buckets
    flops: float
    """FLOPs per image of `work.image_size` in training, without recomputed activations."""
    val_samples: int


def build_workload(
    config: RunConfig, *, samples: int, val_samples: int, num_classes: int
) -> Workload:
    """The training of a recipe, with a model that takes no memory.

    RecipeError if there is no such model, or if it cannot be trained as the recipe says.
    """
    import torch

    from trainyard.estimate.compute import trace_training
    from trainyard.model.flops import forward_flops
    from trainyard.run.build import (
        announce_topology,
        build_mode,
        build_run_course,
        build_run_model,
    )
    from trainyard.training.precision import AUTOCASTS

    with torch.device("meta"):
        model = build_run_model(config, num_classes)
    announce_topology(config.average)
    mode = build_mode(config, model, torch.device("cuda")).name
    config = config.model_copy(update={"model": config.model.model_copy(update={"compile": mode})})
    size, channels = config.data.image_size, config.data.channels
    trained = [weight.numel() for weight in model.parameters() if weight.requires_grad]
    return Workload(
        config=config,
        course=build_run_course(config, samples),
        work=trace_training(model.train(), size, AUTOCASTS[config.batch.precision], channels),
        sizes=model_sizes(model, config),
        buckets=build_buckets(trained),
        flops=3.0 * forward_flops(model, size, channels),
        val_samples=val_samples,
    )


@dataclass(frozen=True)
class Cluster:
    """The hardware, and its costs."""

    network: Network
    device: Accelerator | None = None  # None if only its throughput is known
    measured: MeasuredThroughput | None = None  # None to use the data sheet
    storage: StorageFormat | None = None  # None if data never limits
    cores_per_gpu: int = 12
    node_bytes_per_second: float = math.inf
    price_per_hour: float | None = None  # per GPU
    host_watts: float = 150.0  # the rest of a node, per GPU
    overhead: float = 1.2  # energy for cooling and the like, as a factor (PUE)


# --- time ---


class Stage(NamedTuple):
    """All steps of one global batch and image size."""

    batch: int
    image_size: ImageSize
    samples: int


def training_stages(course: Course, *, gpus: int, more_batch: float = 1.0) -> list[Stage]:
    """The stages of a course, with batches `more_batch` times as large.

    InputError if a batch has fewer samples than there are GPUs.
    """
    stages = [
        Stage(round(p.batch * more_batch), p.image_size, (p.stop - p.start) * p.batch)
        for p in course.phases
    ]
    if (least := min(stage.batch for stage in stages)) < gpus:
        raise InputError(
            f"a batch of {least:,} is not enough for {gpus:,} GPUs: raise --batch.size, or give "
            "--weak to let it grow with the GPUs"
        )
    return stages


@dataclass(frozen=True)
class Scenario:
    """A training on a number of GPUs, with the speed of each part."""

    gpus: int
    stages: list[Stage]
    buckets: Buckets
    memory: Memory
    gpu: "Roofline | MeasuredThroughput"
    network: Network
    data: DataThroughput
    """The throughput of a node."""
    slowdown: float = 1.0
    """Factor on compute times."""

    @property
    def nodes(self) -> int:
        """InputError if nodes would not be full."""
        return self.network.span(self.gpus).nodes

    def compute(self, images: int, image_size: ImageSize) -> float:
        """Seconds of compute in a step of a GPU."""
        return self.slowdown * self.gpu.compute(images, image_size)

    def train(self, average: AverageConfig) -> tuple[StepTime, float]:
        """The mean step of a run, and the seconds of the whole run, without evaluation.

        InputError if nodes would not be full, RecipeError if the topology needs another number.
        """
        steps, sums = 0.0, np.zeros(len(StepTime._fields))
        for batch, image_size, samples in self.stages:
            compute = self.compute(math.ceil(batch / self.gpus), image_size)
            step = step_time(average, self.buckets, self.network, ranks=self.gpus, compute=compute)
            loading = batch / self.nodes / self.data.images  # while a step computes
            step = step._replace(data=max(loading - step.total, 0.0))
            steps += samples / batch
            sums += samples / batch * np.array(step)
        return StepTime(*(sums / steps).tolist()), float(sums.sum())

    def ideal_seconds(self) -> float:
        """Seconds of a run in which each GPU keeps its throughput without loss."""
        images = self.gpu.images
        of_one = sum(s.samples * self.compute(images, s.image_size) / images for s in self.stages)
        return of_one / self.gpus

    def slowed(self, compute: float, data: float, network: float) -> "Scenario":
        """The scenario with slower compute, decoding and network, as factors."""
        return replace(
            self,
            slowdown=compute * self.slowdown,
            data=self.data._replace(decoding=self.data.decoding / data),
            network=self.network.slowed(network),
        )


def build_scenario(
    workload: Workload, cluster: Cluster, *, gpus: int, more_batch: float = 1.0
) -> Scenario:
    """A training on so many GPUs, with batches `more_batch` times those of the recipe.

    InputError if a batch has fewer samples than there are GPUs, or if nodes would not be full.
    """
    config, device, nodes = workload.config, cluster.device, cluster.network.span(gpus).nodes
    stages = training_stages(workload.course, gpus=gpus, more_batch=more_batch)
    memory = gpu_memory(
        *(workload.sizes, workload.work, config),
        ranks=gpus,
        share=math.ceil(stages[0].batch / gpus),
        capacity=None if device is None else device.memory,
    )
    data = DataThroughput()
    if cluster.storage is not None:
        images, num_bytes = cluster.storage
        cores = cluster.cores_per_gpu * gpus // nodes
        data = DataThroughput(cores * images, cluster.node_bytes_per_second / num_bytes)
    gpu = cluster.measured or _roofline(workload, device, memory.micro)
    return Scenario(gpus, stages, workload.buckets, memory, gpu, cluster.network, data)


def _roofline(workload: Workload, device: Accelerator | None, micro: int) -> "Roofline":
    from trainyard.estimate.compute import Roofline

    assert device is not None  # a cluster has a device or a measured throughput
    config = workload.config
    return Roofline(
        workload.work,
        device,
        config.batch.precision,
        micro,
        update_bytes(workload.sizes, config),
        compiled=config.model.compile != "off",
    )


class AveragerTime(NamedTuple):
    """A training by one averager."""

    average: AverageConfig
    step: StepTime | None  # mean of the run; None if impossible, with a `reason`
    seconds: float = math.nan  # of the whole run
    efficiency: float = math.nan  # share of the speed without loss
    reason: str = ""


def compare_averagers(scenario: Scenario, own: AverageConfig) -> list[AveragerTime]:
    """The recipe's own averager, and all averagers with default settings."""
    rows = []
    for average in (own,) * (own not in _CONTENDERS) + _CONTENDERS:
        try:
            step, seconds = scenario.train(average)
            efficiency = scenario.ideal_seconds() / seconds
            rows.append(AveragerTime(average, step, seconds, efficiency))
        except RecipeError as error:
            rows.append(AveragerTime(average, None, reason=str(error)))
    return rows


def _evaluation_seconds(workload: Workload, scenario: Scenario) -> float:
    """Seconds of all evaluations of a run."""
    config, course = workload.config, workload.course
    times = max(course.every(config.run.eval_every).times(course.num_steps), 1)
    size = config.data.eval_size or config.data.image_size
    models = 1 + len(config.model.averages)
    images = min(workload.val_samples, scenario.gpu.images * scenario.gpus)
    # A forward pass takes nearly a third of a step.
    seconds = models * scenario.compute(math.ceil(images / scenario.gpus), size) / 3 / images
    seconds = max(seconds, 1 / (scenario.data.images * scenario.nodes))
    return times * workload.val_samples * seconds


# --- the estimate ---


class Range(NamedTuple):
    low: float
    likely: float
    high: float


class Estimate(NamedTuple):
    """The estimate for one number of GPUs, in bytes, hours, kWh and USD."""

    gpus: int
    nodes: int
    share: int  # images per step and GPU at the start of the run
    memory: Memory
    fits: bool
    hours: Range
    evaluating: float  # hours of evaluation, part of `hours`
    images_per_s: float  # of all GPUs, in training
    utilisation: float | None  # share of the GPUs' peak (MFU); None if not known
    bound: Bound
    reserve: float  # loading speed over the GPUs' demand
    step: StepTime
    sent: float  # per GPU and step
    sent_in_all: float
    checkpoints: float  # on the disk: those kept, the best, and one being written
    kwh: float | None
    cost: float | None


def estimate_run(workload: Workload, cluster: Cluster, scenario: Scenario) -> Estimate:
    """The estimate.

    RecipeError if the averager needs another number of GPUs, InputError if a GPU has no units for
    the precision.
    """
    config, gpus, stages = workload.config, scenario.gpus, scenario.stages
    share = math.ceil(stages[0].batch / gpus)
    step, seconds = scenario.train(config.average)
    rate = sum(stage.samples for stage in stages) / seconds
    demand = rate * step.total / (step.total - step.data)
    span, weight_bytes = cluster.network.span(gpus), total_bytes(workload.buckets)
    sent = sent_bytes(config.average, weight_bytes, span)
    evaluating = _evaluation_seconds(workload, scenario)
    hours = _hours(workload, cluster, scenario, (seconds + evaluating) / 3600)
    gpu_hours, price = gpus * hours.likely, cluster.price_per_hour
    checkpoint = checkpoint_bytes(workload.sizes, config.average, ranks=gpus)
    return Estimate(
        gpus=gpus,
        nodes=span.nodes,
        share=share,
        memory=scenario.memory,
        fits=scenario.memory.fits,
        hours=hours,
        evaluating=evaluating / 3600,
        images_per_s=rate,
        utilisation=_utilisation(workload, cluster, rate / gpus),
        bound=_bound(scenario, step, share),
        reserve=scenario.data.images * span.nodes / demand,
        step=step,
        sent=sent,
        sent_in_all=sent * sum(stage.samples / stage.batch for stage in stages) * gpus,
        checkpoints=(config.run.keep + 2) * checkpoint,
        kwh=_energy(cluster, gpu_hours, busy=step.compute / step.total),
        cost=None if price is None else gpu_hours * price,
    )


def _hours(workload: Workload, cluster: Cluster, scenario: Scenario, likely: float) -> Range:
    """The range of hours around the likely ones."""
    unsure = UNSURE_COMPUTE if cluster.measured is None else UNSURE_MEASURED
    ends = []
    for way in (-1, 1):
        slowed = scenario.slowed(unsure**way, UNSURE_DATA**way, UNSURE_NETWORK**way)
        _, seconds = slowed.train(workload.config.average)
        ends.append((seconds + _evaluation_seconds(workload, slowed)) / 3600)
    return Range(ends[0], likely, ends[1])


def _utilisation(workload: Workload, cluster: Cluster, rate: float) -> float | None:
    """The share of its peak that a GPU reaches at `rate` images per second."""
    from trainyard.estimate.compute import peak_flops

    if cluster.device is None:
        return None
    course, size = workload.course, num_pixels(workload.work.image_size)
    areas = [(p.stop - p.start) * p.batch * num_pixels(p.image_size) / size for p in course.phases]
    flops = workload.flops * sum(areas) / course.samples(course.num_steps)
    return flops * rate / peak_flops(cluster.device, workload.config.batch.precision)


def _bound(scenario: Scenario, step: StepTime, share: int) -> Bound:
    if step.data > 0:
        return scenario.data.bound
    if step.network + step.waiting > step.compute:
        return "network"
    return scenario.gpu.bound(share)


def _energy(cluster: Cluster, gpu_hours: float, *, busy: float) -> float | None:
    """Energy in kWh; None for an unknown device."""
    if cluster.device is None:
        return None
    watts = cluster.device.watts * (_IDLE + (_BUSY - _IDLE) * busy) + cluster.host_watts
    return gpu_hours * watts * cluster.overhead / 1000
