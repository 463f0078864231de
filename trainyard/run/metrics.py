"""Measurements of a run: FLOPs per image, its bottleneck, and bad samples."""

from collections.abc import Callable

from torch import nn

from trainyard.config import RunConfig
from trainyard.course import Course
from trainyard.data.open_datasets import Datasets
from trainyard.files import RunDirectory
from trainyard.model.flops import forward_flops
from trainyard.monitor.bounds import Bounds
from trainyard.monitor.quarantine import Quarantine
from trainyard.monitor.reports import Report, Reporter
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


def with_bounds(report: Reporter, config: RunConfig, world: World) -> Callable[[Report], None]:
    """`report` with what bounds the run every `watch.bounds_minutes`, on the first rank."""
    minutes = config.watch.bounds_minutes
    if not world.is_first or not minutes:
        return report
    return Bounds(report, report.state.clock, every_s=60 * minutes)


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
