"""Training time of a recipe on a number of GPUs, by averager."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainyard.averaging.config import AverageConfig
from trainyard.averaging.topology import BUILT_IN
from trainyard.config import load_recipe
from trainyard.course import Course
from trainyard.errors import InputError, RecipeError
from trainyard.estimate.job import Job, build_job
from trainyard.estimate.network import Cluster
from trainyard.estimate.predict import StepTime, predict
from trainyard.estimate.speed import Speed
from trainyard.estimate.supply import Supply
from trainyard.files import RunDirectory
from trainyard.hardware import Accelerator, find_accelerator
from trainyard.monitor.history import read_history

if TYPE_CHECKING:
    from torch import nn

_CONTENDERS = (
    AverageConfig(),
    *(AverageConfig(name="gossip", topology=topology) for topology in BUILT_IN),
    AverageConfig(name="gossip", hierarchical=True),
    AverageConfig(name="periodic"),
    AverageConfig(name="periodic", overlap=True),
    AverageConfig(name="sharded"),
)


@dataclass(frozen=True)
class Pace:
    """Measured time of one GPU's step, without other GPUs: forward, backward and update."""

    images: int
    seconds: float
    fixed: float
    """Seconds that do not depend on the images: the update, the launches of kernels."""
    image_size: int
    factor: float = 1.0
    """Factor on all times, to see the effect of an error."""

    def compute(self, images: int, image_size: int) -> float:
        """Seconds for another number of images, of another size in pixels."""
        area = (image_size / self.image_size) ** 2
        per_image = (self.seconds - self.fixed) * area * images / self.images
        return self.factor * (self.fixed + per_image)


@dataclass(frozen=True)
class Task:
    """The training to forecast."""

    average: AverageConfig
    course: Course
    job: Job
    pace: Pace | Speed
    supply: Supply | None = None
    """Images per node; None if data never limits."""


class Stage(NamedTuple):
    """All steps of one global batch and image size."""

    batch: int
    image_size: int
    samples: int


class Forecast(NamedTuple):
    average: AverageConfig
    step: StepTime | None  # mean of the run; None if impossible, with a `reason`
    seconds: float = math.nan  # of the whole run
    reason: str = ""


@dataclass(frozen=True)
class Outlook:
    """All averagers on one number of GPUs."""

    gpus: int
    nodes: int
    images: int  # per step and GPU at the start of the run
    ideal: float
    """Seconds of a run in which each GPU keeps its pace without loss."""
    rows: list[Forecast]


def forecast(task: Task, cluster: Cluster, *, gpus: int, more_batch: float = 1.0) -> Outlook:
    """Forecasts of all averagers, for batches `more_batch` times those of the recipe.

    InputError if there are more GPUs than samples in a batch, or if a node would not be full.
    """
    pace, stages = task.pace, stages_of(task.course, gpus=gpus, more_batch=more_batch)
    of_one = sum(s.samples * pace.compute(pace.images, s.image_size) / pace.images for s in stages)
    rows = []
    for average in contenders(task.average):
        try:
            rows.append(forecast_one(average, task, stages, cluster, gpus=gpus))
        except RecipeError as error:
            rows.append(Forecast(average, None, reason=str(error)))
    share = math.ceil(stages[0].batch / gpus)
    return Outlook(gpus, cluster.span(gpus).nodes, share, of_one / gpus, rows)


def stages_of(course: Course, *, gpus: int, more_batch: float = 1.0) -> list[Stage]:
    """The stages of a course. InputError if a batch has fewer samples than there are GPUs."""
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


def forecast_one(
    average: AverageConfig, task: Task, stages: list[Stage], cluster: Cluster, *, gpus: int
) -> Forecast:
    """InputError if nodes would not be full, RecipeError if the topology needs another number."""
    steps, sums = 0.0, np.zeros(len(StepTime._fields))
    nodes = cluster.span(gpus).nodes
    for stage in stages:
        compute = task.pace.compute(math.ceil(stage.batch / gpus), stage.image_size)
        step = predict(average, task.job, cluster, ranks=gpus, compute=compute)
        if task.supply is not None:  # images load while a step computes
            loading = stage.batch / nodes / task.supply.images
            step = step._replace(data=max(loading - step.total, 0.0))
        count = stage.samples / stage.batch
        steps += count
        sums += count * np.array(step)
    return Forecast(average, StepTime(*(sums / steps).tolist()), float(sums.sum()))


def contenders(own: AverageConfig) -> list[AverageConfig]:
    """The recipe's own averager, and all averagers with default settings."""
    return [own] * (own not in _CONTENDERS) + list(_CONTENDERS)


def job_of(model: "nn.Module") -> Job:
    """The messages of a model, which may be on the meta device."""
    return build_job([weight.numel() for weight in model.parameters() if weight.requires_grad])


def pace_of_run(folder: Path, *, gpus: int, fixed: float) -> Pace:
    """The pace of a run on `gpus` GPUs, without its waits for data.

    It is the median of the reports but the first, while batch and image size stay the same.
    InputError if there are too few reports.
    """
    from trainyard.run.build import build_run_course

    directory = RunDirectory(folder)
    try:
        reports = read_history(directory.metrics).train
        config = load_recipe(str(directory.recipe))
    except InputError as error:
        raise InputError(f"{folder} is no run directory: {error}") from None
    if reports:
        course = build_run_course(config, round(reports[0]["samples"] / reports[0]["epoch"]))
        reports = [line for line in reports[1:] if line["step"] <= course.phases[0].stop]
    if not reports:
        raise InputError(f"{directory.metrics}: has no second report of training to go by")
    rate = statistics.median(line["images_per_s"] / (1 - line["data_wait"]) for line in reports)
    return build_pace(
        seconds=config.batch.size / rate,
        images=math.ceil(config.batch.size / gpus),
        fixed=fixed,
        image_size=config.data.image_size,
    )


def device_of_run(folder: Path) -> Accelerator | None:
    """The GPU of a run, if it is known; None if the folder is no run directory."""
    try:
        environment = json.loads(RunDirectory(folder).environment.read_text())
        return find_accelerator(environment["devices"][0])
    except (OSError, ValueError, LookupError):
        return None


def build_pace(*, seconds: float, images: int, fixed: float, image_size: int) -> Pace:
    """A measured pace. InputError if `fixed` is not less than `seconds`."""
    if fixed >= seconds:
        raise InputError(
            f"--fixed-ms {1000 * fixed:g} is no part of a step of {1000 * seconds:.4g} ms: give "
            "less, or the time of a step of more images"
        )
    return Pace(images, seconds, fixed, image_size)
