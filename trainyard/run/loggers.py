"""Destinations of a run's reports: console, metrics.jsonl and trackers."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from trainyard.config import RunConfig
from trainyard.course import Course
from trainyard.errors import InputError, RecipeError
from trainyard.files import RunDirectory
from trainyard.installation import install_hint
from trainyard.monitor.config import WatchConfig
from trainyard.monitor.console import ConsoleSink
from trainyard.monitor.history import read_history
from trainyard.monitor.outcome import Outcome
from trainyard.monitor.reports import JsonLinesSink, Report, Sink
from trainyard.monitor.trackers.tracker import Guarded, Tracker
from trainyard.parent import FIRST_RUN
from trainyard.world import World, together

_OF_HEAD = ("head", "remark", "initial weights", "compile")
_BEGINNING: Report = {"step": 0, "epoch": 0.0, "samples": 0, "time": 0.0}


class Loggers:
    """Trainyard's own sinks first, then trackers, which run on the first rank alone."""

    def __init__(self, sinks: Sequence[Sink] = (), trackers: Sequence[Tracker] = ()) -> None:
        self._sinks, self._trackers = sinks, trackers
        self._all: tuple[Sink | Tracker, ...] = (*sinks, *trackers)
        self._progress = _BEGINNING

    def write(self, report: Report) -> None:
        self._progress = {key: report[key] for key in _BEGINNING}
        for each in self._all:
            each.write(report)

    def show_evaluation(self, count: int, total: int) -> None:
        """Show that an evaluation has seen `count` of `total` samples."""
        for sink in self._sinks:
            sink.show_evaluation(count, total)

    def warn(self, message: str) -> None:
        """Report a tracker's problem to Trainyard's own sinks alone."""
        event = {"kind": "event", "event": "tracker", "level": "warning", "message": message}
        for sink in self._sinks:
            sink.write(event | self._progress)

    def concluded(self, outcome: Outcome) -> Outcome:
        """Notify trackers if the run is complete, not just stopped."""
        for tracker in self._trackers if outcome.stopped is None else ():
            tracker.complete()
        return outcome

    def close(self) -> None:
        # Sinks first, so that output of trackers cannot mix with the live lines.
        for each in self._all:
            each.close()


def check_trackers(watch: WatchConfig, world: World) -> None:
    """RecipeError if a requested tracker is not installed on the first rank."""
    for name in watch.trackers() if world.is_first else ():
        if find_spec(name) is None:
            raise RecipeError(
                "tracker.not-installed",
                "watch.{name} needs {name}: {hint}",
                name=name,
                hint=install_hint(name),
            )


@contextmanager
def open_loggers(
    config: RunConfig,
    folder: RunDirectory,
    course: Course,
    check: Callable[[], None],
    *,
    num_classes: int,
    world: World,
    console: Console,
) -> Iterator[Loggers]:
    """The destinations of reports during a run; `check` comes before a report is written.

    RecipeError, on all ranks, if a tracker cannot start for a reason that the user can fix.
    """
    with together(world):
        screen = partial(ConsoleSink, course, num_classes, console, _shown_before())
        if world.is_first:
            loggers = _opened(config, folder, screen, check=check)
        else:  # quiet unless every rank prints
            loggers = Loggers([] if console.quiet else [screen()])
    with closing(loggers):
        yield loggers


def _shown_before() -> set[object]:
    """What the first run of a sweep has shown before its first step."""
    try:
        events = read_history(Path(os.environ[FIRST_RUN])).events
    except (KeyError, InputError):
        return set()
    events = [event for event in events if event["event"] in _OF_HEAD]
    return {each for e in events for each in (e["message"], *e.get("rows", {}).items())}


def _opened(
    config: RunConfig,
    folder: RunDirectory,
    screen: Callable[[], ConsoleSink],
    *,
    check: Callable[[], None],
) -> Loggers:
    early: list[str] = []  # messages from before there is a sink
    say = early.append
    with ExitStack() as stack:
        trackers = []
        for name, kind in config.watch.trackers().items():
            module = import_module(f"trainyard.monitor.trackers.{name}")
            opened = partial(getattr(module, kind), folder, config.model_dump(mode="json"))
            tracker = Guarded(name, opened, lambda m: say(m))
            trackers.append(tracker)
            stack.callback(tracker.close)
        # Last: from here on live lines are redrawn, and no other output may interfere.
        sinks: list[Sink] = [JsonLinesSink(folder.metrics, check), screen()]
        stack.pop_all()
    loggers = Loggers(sinks, trackers)
    say = loggers.warn
    for message in early:
        loggers.warn(message)
    return loggers
