"""TensorBoard: event files in the run directory."""

import threading
import time
from pathlib import Path
from typing import Any

from trainyard.monitor.reports import Report
from trainyard.monitor.trackers.tracker import figures

_FLUSH_S = 10


class TensorboardTracker:
    """Figures as scalars, events as text, each at its step.

    Repeated steps, after a kill or a rollback, replace earlier ones: a mark in the file invalidates
    everything written before from a given step on.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._tensor, self._text = make_tensor_proto, metadata.create_summary_metadata
        self._files = EventFileWriter(str(folder), flush_secs=_FLUSH_S)
        # The thread keeps the error that ends it, for the next `write` to raise, but prints it too.
        self._thread = type(self._files).__module__
        self._hook, threading.excepthook = threading.excepthook, self._take
        self._step: int | None = None  # of the latest report; None before the first

    def write(self, report: Report) -> None:
        step, is_event = report["step"], report["kind"] == "event"
        if is_event and self._step is None and report["event"] != "resumed":
            return  # written before the resumed step is known
        if self._step is None or step < self._step:
            # A resumed or rolled back run keeps the figures of its step; a new run keeps nothing.
            goes_on = is_event or self._step is not None
            self._purge(step + 1 if goes_on else 0)
        self._step = step
        values = self._message(report) if is_event else self._scalars(report)
        self._put(step, summary=self._summary(value=values))

    def complete(self) -> None:
        pass

    def close(self) -> None:
        try:
            self._files.close()
        finally:
            threading.excepthook = self._hook

    def _take(self, error: threading.ExceptHookArgs) -> None:
        if type(error.thread).__module__ != self._thread:
            self._hook(error)

    def _purge(self, step: int) -> None:
        mark = self._session(status=self._session.START)
        self._put(step, session_log=mark)

    def _scalars(self, report: Report) -> list[Any]:
        return [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in figures(report).items()
            if tag != "step"
        ]

    def _message(self, report: Report) -> list[Any]:
        return [
            self._summary.Value(
                tag=f"events/{report['event']}",
                metadata=self._text(display_name="", description=""),
                tensor=self._tensor(report["message"]),
            )
        ]

    def _put(self, step: int, **content: Any) -> None:
        self._files.add_event(self._event(wall_time=time.time(), step=step, **content))
