"""Estimate of a run: time, memory, disk, network, energy, money, and its bottleneck."""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from trainyard.config import RunConfig
from trainyard.course import Course
from trainyard.estimate.forecast import Forecast, Pace, Stage, Task, forecast_one, stages_of
from trainyard.estimate.job import Job
from trainyard.estimate.memory import Memory, Sizes, checkpoints_bytes, memory_of, update_bytes
from trainyard.estimate.network import Cluster
from trainyard.estimate.predict import StepTime
from trainyard.estimate.speed import Speed, peak_of
from trainyard.estimate.supply import Storage, Supply
from trainyard.estimate.traffic import sent_bytes
from trainyard.estimate.work import Work
from trainyard.hardware import Accelerator

# Possible errors of each part, as a factor either way. Compute from a data sheet: the errors in
# docs/estimate.md; measured compute: those of the averagers in docs/averaging.md. Cores differ from
# the one on which decoding was measured, and networks from their line rate.
UNSURE_COMPUTE, UNSURE_MEASURED, UNSURE_DATA, UNSURE_NETWORK = 1.4, 1.1, 1.5, 1.4
_BUSY, _IDLE = 0.8, 0.3  # power as a share of a GPU's limit, computing and waiting; assumed

Bound = Literal[
    "arithmetic", "memory traffic", "kernel launches", "device", "decoding", "storage", "network"
]


@dataclass(frozen=True)
class Subject:
    """The training to estimate."""

    config: RunConfig
    course: Course
    work: Work
    sizes: Sizes
    job: Job
    flops: float
    """FLOPs per image of `work.image_size` in training, without recomputed activations."""
    val_samples: int


@dataclass(frozen=True)
class Site:
    """The hardware, and its costs."""

    cluster: Cluster
    device: Accelerator | None = None  # None if only its pace is known
    pace: Pace | None = None  # measured; None to use the data sheet
    storage: Storage | None = None  # None if data never limits
    cores_per_gpu: int = 12
    node_bytes_per_second: float = math.inf
    price_per_hour: float | None = None  # per GPU
    host_watts: float = 150.0  # the rest of a node, per GPU
    overhead: float = 1.2  # energy for cooling and the like, as a factor (PUE)


class Range(NamedTuple):
    low: float
    likely: float
    high: float


class Account(NamedTuple):
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
    checkpoints: float  # on the disk
    kwh: float | None
    cost: float | None


class _Run(NamedTuple):
    training: Forecast
    step: StepTime
    evaluating: float  # seconds

    @property
    def hours(self) -> float:
        return (self.training.seconds + self.evaluating) / 3600


def account(subject: Subject, site: Site, *, gpus: int, more_batch: float = 1.0) -> Account:
    """The estimate. InputError or RecipeError if it cannot run: nodes would not be full, say."""
    config = subject.config
    stages = stages_of(subject.course, gpus=gpus, more_batch=more_batch)
    share = math.ceil(stages[0].batch / gpus)
    memory = _memory(subject, site, gpus=gpus, share=share)
    task = task_of(subject, site, memory, gpus=gpus)
    low, run, high = (
        _run(_off(task, site, way), subject, stages, _off_network(site.cluster, way), gpus=gpus)
        for way in (-1, 0, 1)
    )
    nodes = site.cluster.span(gpus).nodes
    rate = sum(stage.samples for stage in stages) / run.training.seconds
    wanted = rate * run.step.total / (run.step.total - run.step.data)
    sent = sent_bytes(config.average, subject.job.num_bytes, ranks=gpus, nodes=nodes)
    steps = sum(stage.samples / stage.batch for stage in stages)
    gpu_hours = gpus * run.hours
    return Account(
        gpus=gpus,
        nodes=nodes,
        share=share,
        memory=memory,
        fits=memory.largest is None or memory.micro <= memory.largest,
        hours=Range(low.hours, run.hours, high.hours),
        evaluating=run.evaluating / 3600,
        images_per_s=rate,
        utilisation=_utilisation(subject, site, rate, gpus),
        bound=_bound(task, run.step, share),
        reserve=math.inf if task.supply is None else task.supply.images * nodes / wanted,
        step=run.step,
        sent=sent,
        sent_in_all=sent * steps * gpus,
        checkpoints=checkpoints_bytes(subject.sizes, config, ranks=gpus),
        kwh=_energy(site, gpu_hours, busy=run.step.compute / run.step.total),
        cost=None if site.price_per_hour is None else gpu_hours * site.price_per_hour,
    )


def _memory(subject: Subject, site: Site, *, gpus: int, share: int) -> Memory:
    micro = subject.config.batch.micro
    return memory_of(
        subject.sizes,
        subject.work,
        subject.config.average,
        ranks=gpus,
        share=share,
        asked=None if micro == "auto" else micro,
        capacity=None if site.device is None else site.device.memory,
    )


def task_of(subject: Subject, site: Site, memory: Memory, *, gpus: int) -> Task:
    """Inputs of the forecasts for a number of GPUs."""
    config = subject.config
    per_node = gpus // site.cluster.span(gpus).nodes
    supply = None
    if site.storage is not None:
        cores = site.cores_per_gpu * per_node
        supply = Supply(site.storage, cores, site.node_bytes_per_second)
    pace: Pace | Speed | None = site.pace
    if pace is None:
        assert site.device is not None  # one of the two is known
        pace = Speed(
            subject.work,
            site.device,
            config.batch.precision,
            micro=memory.micro,
            update_bytes=update_bytes(subject.sizes, config),
            compiled=config.model.compile != "off",
        )
    return Task(config.average, subject.course, subject.job, pace, supply)


def _off(task: Task, site: Site, way: int) -> Task:
    """A task with compute and data better (-1) or worse (1) than estimated."""
    supply = task.supply
    if supply is not None:
        supply = replace(supply, factor=UNSURE_DATA**-way)
    unsure = UNSURE_COMPUTE if site.pace is None else UNSURE_MEASURED
    return replace(task, pace=replace(task.pace, factor=unsure**way), supply=supply)


def _off_network(cluster: Cluster, way: int) -> Cluster:
    def off(bandwidth: float) -> float:
        return float(bandwidth * UNSURE_NETWORK**-way)

    inside, between = cluster.inside, cluster.between
    return replace(
        cluster,
        inside=inside._replace(bandwidth=off(inside.bandwidth)),
        between=between._replace(bandwidth=off(between.bandwidth)),
    )


def _run(task: Task, subject: Subject, stages: list[Stage], cluster: Cluster, *, gpus: int) -> _Run:
    training = forecast_one(task.average, task, stages, cluster, gpus=gpus)
    assert training.step is not None  # otherwise RecipeError was raised
    config, course = subject.config, subject.course
    times = max(course.every(config.run.eval_every).times(course.num_steps), 1)
    size = config.data.eval_size or config.data.image_size
    models = 1 if config.model.ema_decay is None else 2
    images = min(subject.val_samples, task.pace.images * gpus)
    # A forward pass takes nearly a third of a step.
    seconds = models * task.pace.compute(math.ceil(images / gpus), size) / 3 / images
    if task.supply is not None:
        nodes = cluster.span(gpus).nodes
        seconds = max(seconds, 1 / (task.supply.images * nodes))
    return _Run(training, training.step, times * subject.val_samples * seconds)


def _utilisation(subject: Subject, site: Site, rate: float, gpus: int) -> float | None:
    if site.device is None:
        return None
    course, size = subject.course, subject.work.image_size
    areas = [(p.stop - p.start) * p.batch * (p.image_size / size) ** 2 for p in course.phases]
    flops = subject.flops * sum(areas) / course.samples(course.num_steps)
    return flops * rate / gpus / peak_of(site.device, subject.config.batch.precision)


def _bound(task: Task, step: StepTime, share: int) -> Bound:
    if step.data > 0 and task.supply is not None:
        return task.supply.bound
    if step.network + step.waiting > step.compute:
        return "network"
    return task.pace.bound(share) if isinstance(task.pace, Speed) else "device"


def _energy(site: Site, gpu_hours: float, *, busy: float) -> float | None:
    """Energy in kWh; None for an unknown device."""
    if site.device is None:
        return None
    watts = site.device.watts * (_IDLE + (_BUSY - _IDLE) * busy) + site.host_watts
    return gpu_hours * watts * site.overhead / 1000
