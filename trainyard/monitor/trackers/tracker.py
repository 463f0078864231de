"""Common parts of trackers: names of figures, saved ids of runs, error handling."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from trainyard.errors import RecipeError
from trainyard.files import RunDirectory, read_json, write_text
from trainyard.installation import install_hint
from trainyard.monitor.history import read_history, score
from trainyard.monitor.reports import Report

# Fields of every report, whatever its kind; some trackers have a "time" of their own.
_PLACE = {"step": "step", "epoch": "epoch", "samples": "samples", "time": "seconds"}


class Tracker(Protocol):
    def write(self, report: Report) -> None: ...

    def complete(self) -> None:
        """Called when the run is complete; only `close` follows."""

    def close(self) -> None: ...


def figures(report: Report) -> dict[str, float]:
    """The numbers of a train or val report: "train/loss" and the like, "step", "seconds"."""
    return {
        _PLACE.get(key, f"{report['kind']}/{key}"): value
        for key, value in report.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class BestEvaluation:
    """The best evaluation of a run so far, those before it was resumed included."""

    def __init__(self, metrics: Path, best_by: str) -> None:
        self.report: Report = {}
        self._best_by = best_by
        for report in read_history(metrics).val if metrics.exists() else []:
            self.is_improved_by(report)

    def is_improved_by(self, report: Report) -> bool:
        """Whether an evaluation is the new best one, which is then kept."""
        is_better = score(report, self._best_by) > score(self.report, self._best_by)
        if is_better:
            self.report = report
        return is_better


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
                f"{self._path} cannot be read ({error}): remove it; trackers then start a new run"
            ) from None
        return None if known is None else str(known)

    def keep(self, tracker: str, name: str) -> None:
        known = read_json(self._path) if self._path.exists() else {}
        write_text(self._path, json.dumps(known | {tracker: name}, indent=2) + "\n")


class Guarded:
    """A tracker whose failure does not end the run: it is reported once, and the tracker is off."""

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], complain: Callable[[str], None]
    ) -> None:
        """RecipeError if the tracker cannot start for a reason that the user can fix."""
        self._name = name
        self._complain = complain
        self._tracker: Tracker | None = None
        try:
            self._tracker = open_tracker()
        except RecipeError:
            raise
        except ImportError as error:
            raise missing(name, f"{error}") from None
        except Exception as error:
            self._give_up(error)

    def write(self, report: Report) -> None:
        self._attempt(lambda tracker: tracker.write(report))

    def complete(self) -> None:
        self._attempt(lambda tracker: tracker.complete())

    def close(self) -> None:
        self._attempt(lambda tracker: tracker.close())

    def _attempt(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:
            tracker, self._tracker = self._tracker, None
            self._give_up(error)
            _close_anyway(tracker)

    def _give_up(self, error: Exception) -> None:
        reason = f"{error}".strip().partition("\n")[0] or type(error).__name__
        self._complain(
            f"watch.{self._name} is off until the run is started again, as it failed: {reason}"
        )


def _close_anyway(tracker: Tracker) -> None:
    """Close a tracker that has failed, and may fail here again."""
    try:
        tracker.close()
    except Exception:
        return


def missing(name: str, reason: str = "") -> RecipeError:
    """The error for a missing package; `name` is the tracker's package, recipe key and extra."""
    reason = f" ({reason})" if reason else ""
    return RecipeError(f"watch.{name} needs {name}{reason}: {install_hint(name)}")
