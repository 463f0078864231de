"""Adds step, epoch and time to reports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from trainyard.course import Course
from trainyard.monitor.clock import Clock
from trainyard.monitor.eta import Eta
from trainyard.monitor.reports import Report


class State(Protocol):
    """Progress of a run."""

    @property
    def step(self) -> int: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def stream(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Reporter:
    """Adds the common fields to reports and passes them on."""

    write: Callable[[Report], None]
    state: State
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
