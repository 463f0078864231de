"""Reports of a run: flat dicts whose "kind" is train, val or event, and their destinations."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainyard.course import Course
from trainyard.files import JsonLines
from trainyard.monitor.clock import Clock
from trainyard.monitor.eta import Eta

Report = dict[str, Any]
"""One line of metrics.jsonl: plain JSON, with `kind`, `step`, `epoch`, `samples` and `time`."""


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


class Sink(Protocol):
    def write(self, report: Report) -> None: ...

    def show_evaluation(self, count: int, total: int) -> None:
        """Show that an evaluation has seen `count` of `total` samples; nothing is recorded."""

    def close(self) -> None: ...


class JsonLinesSink:
    """metrics.jsonl of the run directory, with a line per report."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self._lines, self._check = JsonLines(path), check

    def write(self, report: Report) -> None:
        self._check()
        self._lines.append(report)

    def show_evaluation(self, count: int, total: int) -> None:
        pass

    def close(self) -> None:
        pass
