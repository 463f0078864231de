"""Common parts of trackers: names of numbers, saved ids of runs, a thread for each of them."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

from trainyard.errors import RecipeError
from trainyard.files import RunDirectory, read_json, write_text
from trainyard.installation import install_hint
from trainyard.monitor.history import best_of, read_history
from trainyard.monitor.reports import Report

_START_S = 10.0  # for an answer before training starts; then a tracker may take longer
_PATIENCE_S = 300.0  # for unsent data at the end of a run
_LOGIN = re.compile(r"://[^/\s\"<>]*@")
# Fields of every report, whatever its kind; some trackers have a "time" of their own.
_OF_ALL_KINDS = {"step": "step", "epoch": "epoch", "samples": "samples", "time": "seconds"}


class Tracker(Protocol):
    """All calls come from one thread, and may take as long as they like.

    Its class takes the run directory and the recipe as JSON, `{"run": {"best_by": ...}, ...}`.
    """

    def write(self, report: Report) -> None: ...

    def complete(self) -> None:
        """Called when the run is complete; only `close` follows."""

    def close(self) -> None: ...


def numbers(report: Report) -> dict[str, float]:
    """The numbers of a train or val report: "train/loss" and the like, "step", "seconds"."""
    return {
        _OF_ALL_KINDS.get(key, f"{report['kind']}/{key}"): value
        for key, value in report.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class BestEvaluation:
    """The best evaluation of a run so far, those before it was resumed included.

    Evaluations that a kill or a rollback has undone do not count.
    """

    def __init__(self, metrics: Path, best_by: str) -> None:
        self._evaluations = read_history(metrics).val if metrics.exists() else []
        self._best_by = best_by
        self.report: Report = {}
        """The best one at the latest call of `after`."""

    def after(self, evaluation: Report) -> dict[str, float]:
        """The numbers of the best one, a new evaluation included: "best/step", "best/top1"."""
        step = evaluation["step"]
        before = [report for report in self._evaluations if report["step"] < step]
        self._evaluations = [*before, evaluation]
        self.report = best_of(self._evaluations, self._best_by)
        best = numbers(self.report | {"kind": "best"}).items()
        return {f"best/{key.removeprefix('best/')}": value for key, value in best}


class TrackerIds:
    """Ids of a run at trackers, kept in trackers.json of the run directory."""

    def __init__(self, folder: Path) -> None:
        self._path = RunDirectory(folder).trackers

    def recall(self, tracker: str) -> str | None:
        """The id at a tracker, or None. RecipeError if the file is not Trainyard's."""
        try:
            known = read_json(self._path).get(tracker)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RecipeError(
                "tracker.ids-unreadable",
                "{path} cannot be read ({reason}): remove it; trackers then start a new run",
                path=self._path,
                reason=str(error),
            ) from None
        return None if known is None else str(known)

    def keep(self, tracker: str, name: str) -> None:
        known = read_json(self._path) if self._path.exists() else {}
        write_text(self._path, json.dumps(known | {tracker: name}, indent=2) + "\n")


class Guarded:
    """A tracker in a thread of its own: what fails or hangs there neither ends nor slows the run.

    A failure is reported once, and the tracker is then off. The thread keeps no process alive.
    """

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], warn: Callable[[str], None]
    ) -> None:
        """RecipeError if the tracker cannot start for a reason that the user can fix."""
        self._name, self._warn = name, warn
        self._jobs: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._error: Exception | None = None
        self._is_off = False
        self._opened, self._ended = Event(), Event()
        Thread(target=self._work, args=(open_tracker,), name=name, daemon=True).start()
        self._opened.wait(_START_S)
        if isinstance(self._error, RecipeError):
            raise self._error
        if isinstance(self._error, ImportError):
            raise RecipeError(
                "tracker.import-failed",
                "watch.{name} needs {name} ({reason}): {hint}",
                name=name,
                reason=str(self._error),
                hint=install_hint(name),
            ) from None
        self._check()

    def write(self, report: Report) -> None:
        self._add(lambda tracker: tracker.write(report))

    def complete(self) -> None:
        self._add(lambda tracker: tracker.complete())

    def close(self) -> None:
        """Waits for unsent data, for some minutes at most; not for a server that never answered."""
        self._check()
        self._jobs.put(None)
        was_opened = self._opened.is_set()
        # One that has failed may still be closing, and would fail again at the end of the process.
        patience_s = (_START_S if self._is_off else _PATIENCE_S) if was_opened else 0
        if not self._ended.wait(patience_s) and not self._error:
            told = f"unsent data after {patience_s:.0f} seconds" if was_opened else "no answer"
            self._error = TimeoutError(told)
        self._check()

    def _add(self, job: Callable[[Tracker], None]) -> None:
        self._check()
        if not self._is_off:
            self._jobs.put(job)

    def _check(self) -> None:
        """Report the failure of an earlier call, once."""
        if self._error is None or self._is_off:
            return
        self._is_off = True
        self._warn(
            f"watch.{self._name} is off until the run is started again, as it failed: "
            f"{reason(self._error)}"
        )

    def _work(self, open_tracker: Callable[[], Tracker]) -> None:
        tracker = None
        try:
            tracker = open_tracker()
            self._opened.set()
            while (job := self._jobs.get()) is not None:
                job(tracker)
            tracker.close()
        except Exception as error:
            self._error = error
            with suppress(Exception):  # it has failed, and may fail here again
                if tracker is not None:
                    tracker.close()
        finally:
            self._opened.set()
            self._ended.set()


def reason(error: Exception) -> str:
    """The first line of a message, which may quote a server's address, without its login."""
    return _LOGIN.sub("://", f"{error}".strip().partition("\n")[0] or type(error).__name__)
