"""The reports of a run, as its metrics.jsonl has them, in the order of training."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.errors import InputError

Report = dict[str, Any]


class History(NamedTuple):
    """After a kill or a roll-back, steps are made again: then the later report counts."""

    train: list[Report]
    val: list[Report]
    events: list[Report]  # all there were


def score(evaluation: Report) -> float:
    """By which the best is chosen: the better top1 of the weights and their average.

    Below all others for no evaluation.
    """
    return max(float(evaluation.get(key, -1.0)) for key in ("top1", "ema_top1"))


def read_history(metrics: Path) -> History:
    """InputError if there is no such file, or a line of it that is not one of ours.

    A last line that is being written is left out.
    """
    try:
        text = metrics.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines(keepends=True)
    except OSError as error:
        raise InputError(f"{metrics}: cannot be read ({error.strerror})") from None
    history = History([], [], [])
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            _add(history, _parsed(line, f"{metrics}, line {number}"))
    return history


def _parsed(line: str, where: str) -> Report:
    try:
        report = json.loads(line)
        if report["kind"] in ("train", "val", "event") and isinstance(report["step"], int):
            return dict(report)
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{where}: is no report of a run")


def _add(history: History, report: Report) -> None:
    if report["kind"] == "event":
        history.events.append(report)
        return
    reports = getattr(history, report["kind"])
    while reports and reports[-1]["step"] >= report["step"]:
        reports.pop()
    reports.append(report)
