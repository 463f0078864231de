"""trackio: a database of runs on this machine, in $TRACKIO_DIR."""

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from trainyard.monitor.reports import Report
from trainyard.monitor.trackers.tracker import TrackerIds, figures


class TrackioTracker:
    """A run named like the run directory; a resumed run continues it."""

    def __init__(self, folder: Path, recipe: dict[str, Any], *, project: str) -> None:
        memory, name = TrackerIds(folder), folder.resolve().name
        is_known = memory.recall("trackio") is not None
        with _in_silence(), contextlib.ExitStack() as stack:
            import trackio

            self._finish: Callable[[], None] = trackio.finish
            self._warnings = _Warnings(str(Path(trackio.__file__).parent))
            stack.callback(self._warnings.close)
            self._run = trackio.init(
                project=project,
                name=name,
                config=recipe,
                # A run in another folder may have the same name.
                resume="allow" if is_known else "never",
                embed=False,
                auto_log_gpu=False,  # reports include GPU figures already
                auto_log_cpu=False,
            )
            stack.pop_all()
        memory.keep("trackio", name)

    def write(self, report: Report) -> None:
        self._warnings.raise_first()
        if report["kind"] != "event":
            numbers = figures(report)
            self._run.log(numbers, step=int(numbers.pop("step")))

    def complete(self) -> None:
        pass

    def close(self) -> None:
        try:
            with _in_silence():
                self._finish()
            self._warnings.raise_first()
        finally:
            self._warnings.close()


class _Warnings:
    """Raises trackio's warnings as errors: it never raises, but warns from its own thread."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._first: str | None = None
        self._show = warnings.showwarning
        warnings.showwarning = self._take

    def raise_first(self) -> None:
        if self._first is not None:
            first, self._first = self._first, None
            raise RuntimeError(first)

    def close(self) -> None:
        warnings.showwarning = self._show

    def _take(  # noqa: PLR0917 (as Python calls it)
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if filename.startswith(self._package):
            self._first = self._first or f"{message}"
        else:
            self._show(message, category, filename, lineno, file, line)


def _in_silence() -> contextlib.redirect_stdout[io.StringIO]:
    """Hides trackio's greetings from stdout, which holds results alone."""
    return contextlib.redirect_stdout(io.StringIO())
