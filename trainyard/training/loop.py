"""The training loop: it decides when, the step decides what."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from trainyard.course import Due
from trainyard.errors import Stopped
from trainyard.monitor.history import score
from trainyard.training.checkpoint import TrainState
from trainyard.training.step import Batch, StepStats

Report = dict[str, Any]


class Rates(Protocol):
    def _asdict(self) -> dict[str, Any]: ...


class Meter(Protocol):
    def add(self, stats: StepStats) -> None: ...
    def report(self) -> Report: ...


class Quarantine(Protocol):
    def note(self, split: str, bad: Iterable[Any]) -> None: ...
    def exchange(self) -> None: ...


class Stop(Protocol):
    def poll(self) -> type[Stopped] | None: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """The built parts of a run; none of them is optional, a part that is off does nothing."""

    state: TrainState
    is_over: Callable[[int], bool]  # after so many steps
    feed: Iterator[Any]  # batches from state.step on
    step: Callable[[Batch, int, Any], StepStats]
    schedule: Callable[[int], Rates]
    meter: Meter
    quarantine: Quarantine
    report: Callable[[Report], None]
    evaluate: Callable[[], Report]  # has top1, and ema_top1 where there is an average
    save: Callable[[], None]
    roll_back: Callable[[], None]
    stop: Stop
    log_every: Due
    eval_every: Due
    save_every: Due
    phase: Callable[[str], AbstractContextManager[None]]


def train(run: Training) -> type[Stopped] | None:
    """Train to the last step, or until asked to stop: then the reason is returned.

    The order of the lines is a contract. A step is counted before anything is said about it, so
    every report and checkpoint of step N is about N whole updates. An evaluation comes before the
    save that records it; one that a stop cut off is made up for on resuming. Nothing is fetched
    between a step and its save, so the batch after a checkpoint is always that of its step. What
    was bad up to a checkpoint is written down before it: going on from there, it would not be met
    again in this epoch. Where gradients stay useless the weights go back to a checkpoint and the
    data runs on; that is decided before a step from what a checkpoint holds, so a run that was
    stopped or killed goes back where it would have without.
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
        rates = run.schedule(state.step)
        stats = run.step(batch, state.step, rates)
        state.step += 1
        state.guard.add(stats.skipped)
        run.meter.add(stats)
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
    step = run.state.step
    is_done = step == run.state.last.get("step", 0)
    return not is_done and (run.eval_every.due(step) or run.is_over(step))


def evaluate(run: Training) -> bool:
    """Evaluate the consensus and report it; True if it is the best so far."""
    state = run.state
    with run.phase("eval"), state.averager.consensus():
        state.last = {"step": state.step, **run.evaluate(), **state.averager.figures()}
    run.quarantine.exchange()
    is_best = score(state.last) > score(state.best)
    if is_best:
        state.best = state.last
    run.report({"kind": "val", **state.last, "evaluated": state.last["samples"]})
    return is_best


def save(run: Training) -> None:
    with run.phase("save"), run.state.averager.consensus():
        run.save()
