"""Measurements of a run: FLOPs per image, its bottleneck, and bad samples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainyard.config import RunConfig
from trainyard.course import Course
from trainyard.data.open_datasets import Datasets
from trainyard.files import RunDirectory
from trainyard.model.flops import forward_flops
from trainyard.monitor.bounds import Measured, as_event, judge
from trainyard.monitor.clock import Clock
from trainyard.monitor.quarantine import Quarantine
from trainyard.monitor.reporter import Reporter
from trainyard.run.build import waits_in_forward
from trainyard.training.headroom import Observed
from trainyard.training.step import StepStats, TrainStep
from trainyard.world import World, together


def ideal_seconds(
    course: Course, model: nn.Module, peak: float | None, *, channels: int = 3
) -> Callable[[int], float | None]:
    """Seconds per image at a device's peak, as a function of the step; None if not known.

    `model` must not be wrapped yet; `peak` is in FLOP/s.
    """
    if peak is None:
        return lambda step: None
    sizes = {phase.image_size for phase in course.phases}
    try:  # backward takes twice the time of forward
        seconds = {size: 3.0 * forward_flops(model, size, channels) / peak for size in sizes}
    except RuntimeError:  # the model cannot run on meta tensors
        return lambda step: None
    return lambda step: seconds[course.phase(step).image_size]


def with_bottleneck_reports(
    step: TrainStep,
    config: RunConfig,
    course: Course,
    clock: Clock,
    *,
    world: World,
    report: Reporter,
) -> Callable[[Any, int, Any], StepStats]:
    """A step that reports the run's bottleneck every `watch.bounds_minutes`, on the first rank."""
    if not world.is_first or not config.watch.bounds_minutes:
        return step
    device = next(step.model.parameters()).device
    advice = _device_advice(config, device)

    def tell(found: Measured) -> None:
        report(as_event(found, judge(found, advice)))

    return Observed(
        step,
        course=course,
        clock=clock,
        world=world,
        device=device,
        every_s=60 * config.watch.bounds_minutes,
        can_try=waits_in_forward(config, world) is None,
        report=tell,
    )


def _device_advice(config: RunConfig, device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    if config.batch.precision in ("fp32", "tf32"):
        return "batch.precision = 'bf16' takes less of it"
    if config.model.compile == "off":
        return "model.compile = 'default' takes less of it"
    return "more of them would help"


def open_quarantine(
    config: RunConfig, folder: RunDirectory, data: Datasets, world: World
) -> Quarantine:
    """The list of bad samples in the run directory, with its limit."""
    with together(world):
        return Quarantine(
            folder.quarantine,
            world=world,
            max_bad=config.data.max_bad,
            num_samples={"train": len(data.train), "val": len(data.val)},
        )
