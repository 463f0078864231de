"""Adds step, epoch and time to reports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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
        return {
            "step": self.state.step,
            "epoch": self.course.epoch(self.state.step),
            "samples": self.course.samples(self.state.step),
            "time": self.state.clock.total,
        }
