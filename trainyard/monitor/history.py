"""Reports of a run from its metrics.jsonl, in the order of training."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainyard.errors import InputError
from trainyard.files import json_object
from trainyard.monitor.reports import Report

ENDED_EARLY = "ended early"
"""The event of a run that ends by run.patience."""
FAILED = ("failed", "rank hangs", "rank gone")
"""The events of a run that ends by an error, as far as it can be written down."""
PROBE = "linear_probe"
"""The key of the score before the first step, in each later evaluation too."""
METRICS = {
    "top1": "top-1",
    "top5": "top-5",
    "balanced_accuracy": "balanced accuracy",
    "map": "mAP",
    "micro_f1": "micro-F1",
    "macro_f1": "macro-F1",
}
"""Names of the values of an evaluation, by their keys."""
_TRAINING = '{"kind": "train"'  # the beginning of a line
_SHARES = (*METRICS, PROBE)  # and with the prefixes of moving averages
_AMOUNTS = ("step", "epoch", "samples", "time", "evaluated", "world_size")
_MOST = 2**53  # to which all whole numbers are exact as floats


class History(NamedTuple):
    """Reports by kind. If a step was repeated, after a kill or a rollback, the later one counts."""

    train: list[Report]
    val: list[Report]
    events: list[Report]  # all of them


def shows_top5(classes: int) -> bool:
    """False for ten classes or fewer: top-5 of them is near 100% whatever was learned."""
    return classes > 10


def number(report: Report, key: str) -> float | None:
    """A number in a report; None if it is missing."""
    value = report.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def score(evaluation: Report, by: str) -> float:
    """Value that decides the best evaluation: the higher one of the weights and their average.

    `by` is the key of the value, as in run.best_by. An empty report scores below all others.
    """
    values = (number(evaluation, key) for key in (by, f"ema_{by}"))
    return max((float(value) for value in values if value is not None), default=-1.0)


def best_of(evaluations: Sequence[Report], by: str) -> Report:
    """That of the checkpoint `best`, the last if several are equal; {} without one."""
    return max(reversed(evaluations), key=lambda report: score(report, by), default={})


def read_history(metrics: Path, *, is_brief: bool = False) -> History:
    """InputError if the file is missing or a line is not one of Trainyard's reports.

    An incomplete last line is ignored, as it is still being written. `is_brief`: of the training
    reports, which are nearly all, the last alone.
    """
    history, skipped = History([], [], []), ("", 0)
    try:
        with open(metrics, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if is_brief and line.startswith(_TRAINING):
                    skipped = (line, number) if line.endswith("\n") else skipped
                elif line.endswith("\n"):
                    _add(history, _parsed(line, metrics, number))
    except OSError as error:
        raise InputError("file.unreadable", path=metrics, reason=error.strerror) from None
    if skipped[0]:
        _add(history, _parsed(skipped[0], metrics, skipped[1]))
    return history


def _parsed(line: str, metrics: Path, number: int) -> Report:
    try:
        report = json_object(line)
        _check(report)
    except ValueError as error:
        reason = str(error)
        raise InputError(
            "run.not-a-report",
            "{path}, line {line}: is not a report of a run: {reason}",
            path=metrics,
            line=number,
            reason=reason,
        ) from None
    return report


def _check(report: Report) -> None:
    """ValueError for a report that no run writes."""
    if report.get("kind") not in ("train", "val", "event"):
        raise ValueError("its kind is not train, val or event")
    if type(report.get("step")) is not int:
        raise ValueError("its step is no whole number")
    for key in report:
        largest = 1 if key.endswith(_SHARES) else _MOST if key in _AMOUNTS else None
        if largest is None or report[key] is None:
            continue
        value = number(report, key)
        if value is None or not 0 <= value <= largest:
            raise ValueError(f"{key} is no number between 0 and {largest:,}")


def _add(history: History, report: Report) -> None:
    if report["kind"] == "event":
        history.events.append(report)
        return
    reports = getattr(history, report["kind"])
    while reports and reports[-1]["step"] >= report["step"]:
        reports.pop()
    reports.append(report)
