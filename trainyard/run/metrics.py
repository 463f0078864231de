"""Measurements of a run: reports with their step, and FLOPs per image."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from trainyard.course import Course
from trainyard.model.flops import forward_flops
from trainyard.monitor.eta import Eta
from trainyard.monitor.reports import Report
from trainyard.training.checkpoint import TrainState


@dataclass(frozen=True)
class Reporter:
    """Adds the common fields to reports and passes them on."""

    write: Callable[[Report], None]
    state: TrainState
    course: Course
    count_bad: Callable[[], int]
    """Number of unreadable training samples."""
    eta: Eta

    def __call__(self, report: Report) -> None:
        more: Report = {}
        if report["kind"] == "train":
            more = {"bad": self.count_bad(), **self.eta.after(self.state.step, self.state.clock)}
        self.write(report | self.when() | more)

    def warn(self, event: str, message: str) -> None:
        self({"kind": "event", "event": event, "level": "warning", "message": message})

    def when(self) -> Report:
        step, stream = self.state.step, self.state.stream
        epoch, samples = self.course.epoch(step), self.course.samples(step)
        if "past" in stream:  # steps of a stream have fewer samples than the batch; see JoinState
            samples = stream["past"] + stream["seen"]
            epoch = len(stream["ends"]) + min(stream["seen"] / self.course.epoch_samples, 1.0)
        return {"step": step, "epoch": epoch, "samples": samples, "time": self.state.clock.total}


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
