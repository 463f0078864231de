"""Recording of some steps with torch's profiler: a trace, and a table of operators."""

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from trainyard.files import atomic_write, write_text
from trainyard.monitor.config import window_of

if TYPE_CHECKING:
    import torch

Stats = TypeVar("Stats")
Step = Callable[[Any, int, Any], Stats]

_SHOWN, _WRITTEN = 10, 50  # operators
_MARK = "step "


@contextmanager
def profiling(
    window: str | None, folder: Path, report: Callable[[dict[str, Any]], None]
) -> Iterator[Callable[[Step[Stats]], Step[Stats]]]:
    """Yields a decorator of a step that records a window, "64:72"; None records nothing.

    Step 64 makes update 65: it begins after 64 updates. The trace includes work between the steps,
    such as an evaluation. A run that resumes within its window records the rest of it; one that
    ends there writes the part so far. `folder` gets trace.json.gz, for chrome://tracing or
    Perfetto, and summary.txt.
    """
    if window is None:
        yield lambda step: step
        return
    recorder = _Recorder(window_of(window), folder, report)
    try:
        yield recorder.around
    except BaseException:
        recorder.drop()
        raise
    recorder.finish()


class _Recorder:
    def __init__(
        self, window: tuple[int, int], folder: Path, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self._first, self._end = window
        self._folder = folder
        self._report = report
        self._profile: torch.profiler.profile | None = None  # set while it records
        self._begin = self._next = 0  # range of recorded steps
        self._is_done = False  # records once, even if a rollback repeats the steps

    def around(self, step: Step[Stats]) -> Step[Stats]:
        def recorded(batch: Any, number: int, rates: Any) -> Stats:
            if self._profile is None and self._is_due(number):
                self._start(number)
            if self._profile is None:
                return step(batch, number, rates)
            from torch.profiler import record_function

            with record_function(f"{_MARK}{number}"):
                stats = step(batch, number, rates)
            self._next = number + 1
            if self._next >= self._end:
                self.finish()
            return stats

        return recorded

    def finish(self) -> None:
        """End a recording, if there is one, and write it; a full disk does not end the run."""
        profile = self._stopped()
        if profile is None:
            return
        event = {"kind": "event", "event": "profile"}
        steps = f"steps {self._begin} to {self._next - 1}"
        rows = _operators(profile)
        try:
            self._folder.mkdir(exist_ok=True)
            write_text(self._folder / "summary.txt", f"{steps}\n\n{_table(rows, _WRITTEN)}\n")
            _write_trace(profile, self._folder / "trace.json.gz")
        except OSError as error:
            message = f"the profile of {steps} could not be written: {error}"
            self._report(event | {"level": "warning", "message": message})
            return
        message = f"profile of {steps}, in {self._folder}:\n{_table(rows, _SHOWN)}"
        self._report(event | {"message": message})

    def drop(self) -> None:
        """Discard the recording."""
        self._stopped()

    def _is_due(self, number: int) -> bool:
        return not self._is_done and self._first <= number < self._end

    def _start(self, number: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        has_gpu = torch.cuda.is_available()
        # The profiler prints errors alone; without a GPU nothing, as "no GPU" is an error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "4" if has_gpu else "99")
        activities = [ProfilerActivity.CPU]
        if has_gpu:
            torch.cuda.synchronize()  # otherwise earlier steps would end in the trace
            activities.append(ProfilerActivity.CUDA)
        # torch 2.11 warns that it clears events, without acc_events.
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        self._begin = self._next = number

    def _stopped(self) -> "torch.profiler.profile | None":
        profile, self._profile = self._profile, None
        if profile is not None:
            import torch

            self._is_done = True
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profile.stop()
        return profile


def _write_trace(profile: "torch.profiler.profile", path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(plain))
        with (
            open(plain, "rb") as trace,
            atomic_write(path) as file,
            gzip.open(file, "wb") as packed,
        ):
            shutil.copyfileobj(trace, packed)


class _Row(NamedTuple):
    operator: str
    calls: int
    cpu_ms: float  # without the operators that it calls
    device_ms: float


def _operators(profile: "torch.profiler.profile") -> list[_Row]:
    """Operators by their own time, longest first: on the GPU if there is one."""
    rows = [
        _Row(
            event.key,
            event.count,
            event.self_cpu_time_total / 1e3,
            event.self_device_time_total / 1e3,
        )
        for event in profile.key_averages()
        if not event.key.startswith(_MARK)
    ]
    return sorted(rows, key=lambda row: (row.device_ms, row.cpu_ms), reverse=True)


def _table(rows: list[_Row], most: int) -> str:
    has_device = any(row.device_ms for row in rows)
    cpu_ms = sum(row.cpu_ms for row in rows) or 1.0
    device_ms = sum(row.device_ms for row in rows) or 1.0
    width = max((len(_short(row.operator)) for row in rows[:most]), default=8)
    head = f"{'operator':<{width}} {'calls':>7} {'CPU ms':>10} {'share':>6}"
    lines = [head + (f" {'CUDA ms':>10} {'share':>6}" if has_device else "")]
    for row in rows[:most]:
        line = (
            f"{_short(row.operator):<{width}} {row.calls:7,} {row.cpu_ms:10.2f} "
            f"{row.cpu_ms / cpu_ms:6.1%}"
        )
        if has_device:
            line += f" {row.device_ms:10.2f} {row.device_ms / device_ms:6.1%}"
        lines.append(line)
    if len(rows) > most:
        lines.append(f"and {len(rows) - most} more")
    return "\n".join(lines)


def _short(operator: str) -> str:
    """A shortened name: names of kernels include all their template arguments."""
    return operator if len(operator) <= 60 else operator[:59] + "…"
