"""Recording of some steps with torch's profiler: a trace, and a table of operators."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainyard.errors import RecipeError
from trainyard.files import part_of, write_text
from trainyard.monitor.config import window_of

Stats = TypeVar("Stats")
Step = Callable[[Any, int, Any], Stats]
ReportEvent = Callable[[dict[str, Any]], None]

_SHOWN, _WRITTEN = 3, 50  # operators
_STEP = "ProfilerStep"  # torch's mark of a step, among the operators


def check_window(window: str | None, num_steps: int) -> None:
    """RecipeError for a window in which a run of so many steps has no step."""
    if window is not None and window_of(window)[0] >= num_steps:
        raise RecipeError(
            "recipe.profile-after-end",
            'watch.profile = "{value}": begins after the last step: the run has {num_steps:,}',
            value=window,
            num_steps=num_steps,
        )


@contextmanager
def profiling(
    window: str | None, start: int, folder: Path, report: ReportEvent
) -> Iterator[Callable[[Step[Stats]], Step[Stats]]]:
    """Yields a decorator of a step that records a window, "64:72"; None records nothing.

    Step 64 makes update 65: it begins after 64 updates. `start` is the run's next step. The trace
    includes work between the steps, such as an evaluation. A run that resumes within its window
    records the rest of it; one that ends there writes the part so far. `folder` gets trace.json.gz,
    for chrome://tracing or Perfetto, and summary.txt.
    """
    first, end = (0, 0) if window is None else window_of(window)
    begin = max(first, start)
    if begin >= end:
        yield lambda step: step
        return
    write = partial(_write, begin=begin, before=begin - start, folder=folder, report=report)
    recorder = _recorder(begin - start, end - begin, write)

    def recorded(step: Step[Stats]) -> Step[Stats]:
        def stepped(batch: Any, number: int, rates: Any) -> Stats:
            stats = step(batch, number, rates)
            recorder.step()
            return stats

        return stepped

    with recorder:
        try:
            yield recorded
        except BaseException:
            recorder.on_trace_ready = None  # a run that fails writes nothing
            raise


def _recorder(before: int, count: int, write: Callable[[profile], None]) -> profile:
    """A recorder of `count` steps after as many as `before`; `write` gets what it recorded."""
    has_gpu = torch.cuda.is_available()
    # The profiler prints errors alone; without a GPU nothing, as "no GPU" is an error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "4" if has_gpu else "99")
    with warnings.catch_warnings(action="ignore"):  # of a window without a step before it
        plan = schedule(wait=max(before - 1, 0), warmup=min(before, 1), active=count, repeat=1)
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else ())],
        schedule=plan,
        on_trace_ready=write,
        acc_events=True,  # without it, torch 2.11 warns that it clears events
    )


def _write(done: profile, *, begin: int, before: int, folder: Path, report: ReportEvent) -> None:
    """Write the steps since `begin`, before which `before` were made in this process.

    A full disk does not end the run.
    """
    count = done.step_num - before
    if not count:
        return
    steps = f"{count} steps from step {begin} on" if count > 1 else f"step {begin}"
    event = {"kind": "event", "event": "profile"}
    operators = done.key_averages()
    has_device = any(operator.self_device_time_total for operator in operators)
    by = "self_device_time_total" if has_device else "self_cpu_time_total"
    try:
        folder.mkdir(exist_ok=True)
        table = operators.table(sort_by=by, row_limit=_WRITTEN)
        write_text(folder / "summary.txt", f"{steps}\n\n{table}\n")
        part = part_of(folder / "trace").with_suffix(".json.gz")
        done.export_chrome_trace(str(part))
        os.replace(part, folder / "trace.json.gz")
    except OSError as error:
        message = f"the profile of {steps} could not be written: {error}"
        report(event | {"level": "warning", "message": message})
        return
    times = {one.key: getattr(one, by) for one in operators if not one.key.startswith(_STEP)}
    longest = sorted(times, key=times.__getitem__, reverse=True)[:_SHOWN]
    shown = ", ".join(f"{name[:40]} {times[name] / 1e3:.1f} ms" for name in longest)
    report(event | {"message": f"profile of {steps}, in {folder}; longest: {shown}"})
