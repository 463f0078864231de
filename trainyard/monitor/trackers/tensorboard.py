"""TensorBoard: event files in the run directory."""

from functools import partial
from typing import Any

from trainyard.files import RunDirectory
from trainyard.monitor.reports import Report
from trainyard.monitor.trackers.tracker import numbers

_FLUSH_S = 10


class TensorboardTracker:
    """Numbers as scalars, events as text, each at its step.

    Repeated steps, after a kill or a rollback, replace earlier ones: a new event file purges
    everything that was written before from a given step on.
    """

    def __init__(self, folder: RunDirectory, recipe: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        events = folder.path / "tensorboard"
        events.mkdir(exist_ok=True)
        self._open = partial(SummaryWriter, str(events), flush_secs=_FLUSH_S)
        self._writer: SummaryWriter | None = None
        self._step = 0  # of the latest report

    def write(self, report: Report) -> None:
        step, is_event = report["step"], report["kind"] == "event"
        if self._writer is None:
            if is_event and report["event"] != "resumed":
                return  # written before the resumed step is known
            # A resumed run keeps the numbers of its step; a new run keeps nothing.
            self._writer = self._open(purge_step=step + 1 if is_event else 0)
        elif step < self._step:  # the run rolled back
            self._writer.close()
            self._writer = self._open(purge_step=step + 1)
        self._step = step
        if is_event:
            self._writer.add_text(f"events/{report['event']}", report["message"], step)
            return
        for tag, value in numbers(report).items():
            if tag != "step":
                self._writer.add_scalar(tag, value, step)

    def complete(self) -> None:
        pass

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
