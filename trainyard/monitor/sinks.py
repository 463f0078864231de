"""Destinations of reports. A report is a flat dict whose "kind" is train, val or event."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from trainyard.files import JsonLines
from trainyard.monitor.reports import Report


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


class Sinks:
    """Several sinks as one; empty on every rank but the first."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, report: Report) -> None:
        for sink in self._sinks:
            sink.write(report)

    def show_evaluation(self, count: int, total: int) -> None:
        for sink in self._sinks:
            sink.show_evaluation(count, total)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
