"""Reports of a run: flat dicts whose "kind" is train, val or event, and their destinations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainyard.files import JsonLines

Report = dict[str, Any]
"""One line of metrics.jsonl: plain JSON, with `kind`, `step`, `epoch`, `samples` and `time`."""


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
