"""The training loop: the order of steps, reports, evaluations and saves."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from trainyard.course import Due
from trainyard.errors import Stopped
from trainyard.monitor.history import score
from trainyard.monitor.reports import Report
from trainyard.training.checkpoint import TrainState
from trainyard.training.step import Batch, StepStats


class Rates(Protocol):
    def _asdict(self) -> dict[str, Any]: ...


class Meter(Protocol):
    def add(self, stats: StepStats, capacity: float) -> None: ...
    def report(self) -> Report: ...


class Quarantine(Protocol):
    def note(self, split: str, bad: Iterable[Any]) -> None: ...
    def exchange(self) -> None: ...


class Stop(Protocol):
    def poll(self) -> type[Stopped] | None: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """The built parts of a run. None is optional: a part that is off does nothing."""

    state: TrainState
    is_over: Callable[[int], bool]  # after so many steps
    feed: Iterator[Any]  # batches from state.step on
    find_micro_batch: Callable[[Batch, int], None]  # called before each step
    step: Callable[[Batch, int, Any], StepStats]
    schedule: Callable[[int], Rates]
    meter: Meter
    quarantine: Quarantine
    report: Callable[[Report], None]
    evaluate: Callable[[], Report]  # has state.best_by, and ema_… of it where there is an average
    save: Callable[[], None]
    roll_back: Callable[[], None]
    stop: Stop
    log_every: Due
    eval_every: Due
    save_every: Due
    phase: Callable[[str], AbstractContextManager[None]]


def train(run: Training) -> type[Stopped] | None:
    """Trains to the last step, or until a stop request: then returns its reason.

    The order of the lines is a contract. A step is counted before it is reported or saved, so every
    report and checkpoint of step N is about N whole updates. An evaluation comes before the save
    that records it; a resumed run repeats an evaluation that a stop cut off. No batch is fetched
    between a step and its checkpoint. After a resume, the first batch is therefore the batch of the
    saved step. Bad samples are written down before a checkpoint: a run resumed from it would not
    meet them again in this epoch. If gradients stay non-finite, the weights return to a checkpoint
    and the data continues. That decision is made before a step and from saved state alone, so an
    interrupted run rolls back where an uninterrupted one would.
    """
    state = run.state
    if evaluation_is_due(run):
        evaluate(run)
        save(run)
    while not run.is_over(state.step):
        if state.guard.tripped(state.step):
            run.roll_back()
        with run.phase("data"):
            batch = next(run.feed)
        run.find_micro_batch(batch, state.step)
        rates = run.schedule(state.step)
        stats = run.step(batch, state.step, rates)
        state.step += 1
        state.guard.add(stats.skipped)
        run.meter.add(stats, batch.capacity)
        run.quarantine.note("train", batch.bad)
        is_last = run.is_over(state.step)
        stopped = run.stop.poll()
        save_is_due = run.save_every.due(state.step) or is_last or stopped
        if run.log_every.due(state.step) or save_is_due:
            run.quarantine.exchange()
            run.report({"kind": "train", **rates._asdict(), **run.meter.report()})
        is_best = not stopped and evaluation_is_due(run) and evaluate(run)
        if save_is_due or is_best:
            save(run)
        if stopped:
            return stopped
    return None


def evaluation_is_due(run: Training) -> bool:
    """True if an evaluation follows the current step."""
    step = run.state.step
    is_done = step == run.state.last.get("step", 0)
    return not is_done and (run.eval_every.due(step) or run.is_over(step))


def evaluate(run: Training) -> bool:
    """Evaluates the consensus and reports it; True if it is the best so far."""
    state = run.state
    with run.phase("eval"), state.averager.consensus():
        state.last = {"step": state.step, **run.evaluate(), **state.averager.metrics()}
    run.quarantine.exchange()
    is_best = score(state.last, state.best_by) > score(state.best, state.best_by)
    if is_best:
        state.best = state.last
    run.report({"kind": "val", **state.last, "evaluated": state.last["samples"]})
    return is_best


def save(run: Training) -> None:
    """Save a checkpoint of the consensus, in a timed phase."""
    with run.phase("save"), run.state.averager.consensus():
        run.save()
