"""A table of the runs below a folder, from their own files, of which none is trusted."""

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainyard.course import amount_of
from trainyard.errors import InputError
from trainyard.files import is_locked, is_run
from trainyard.monitor.history import FAILED, METRICS, number
from trainyard.monitor.reports import Report
from trainyard.printable import duration
from trainyard.report.runs import Run, read_brief

_DEPTH = 4  # folders in folders, to which runs are sought
_MOST_SECONDS = 1e10  # of a run; 300 years
_DAY_S = 24 * 3600

LEAST = ("recipe", "at epoch", "changed")
"""Columns that give way in a narrow terminal, in this order."""
State = Literal["training", "done", "ended early", "failed", "interrupted", "unreadable"]


@dataclass(frozen=True)
class Row:
    """A run of the table. Values that are not known are None."""

    run: str
    """Its folder."""
    name: str
    """The folder below the one that was searched."""
    state: State
    changed: float
    """The time of its last report, in seconds since 1970."""
    recipe: str | None = None
    """The recipe as the command named it."""
    model: str | None = None
    step: int = 0
    epoch: float = 0.0
    length: str | None = None
    """run.length."""
    best_by: str = "top1"
    best: float | None = None
    best_step: int | None = None
    best_epoch: float | None = None
    seconds: float = 0.0
    """The time of training, over all restarts."""
    message: str | None = None
    """Why it failed, or is unreadable."""


def list_runs(folder: Path, order: str = "best") -> list[Row]:
    """The runs in and below a folder: the best first, by name, or the last one that changed first.

    InputError if there is none.
    """
    rows = [_row(path, _name(path, folder)) for path in _runs_below(folder)]
    if not rows:
        raise InputError("run.none-below", "{path}: there is no run directory in it", path=folder)
    return sorted_rows(rows, order)


def sorted_rows(rows: Iterable[Row], order: str = "best") -> list[Row]:
    """Rows in one of the orders of `list_runs`; equal ones by name."""
    by_name = sorted(rows, key=lambda row: row.name)
    if order == "changed":
        return sorted(by_name, key=lambda row: row.changed, reverse=True)
    if order == "best":
        return sorted(by_name, key=lambda row: -1.0 if row.best is None else row.best, reverse=True)
    return by_name


def _runs_below(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """The run directories in a folder, without those inside others; links are not followed."""
    if is_run(folder):
        yield folder
        return
    try:
        inside = [
            entry.name
            for entry in os.scandir(folder)
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        ]
    except OSError as error:
        if depth == _DEPTH:
            raise InputError("file.unreadable", path=folder, reason=error.strerror) from None
        return
    for name in inside if depth else ():
        yield from _runs_below(folder / name, depth - 1)


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path != folder else path.resolve().name


def _row(path: Path, name: str) -> Row:
    try:
        return _row_of(read_brief(path, name))
    except (InputError, OSError) as error:
        return Row(str(path), name, "unreadable", _changed(path), message=str(error))


def _row_of(run: Run) -> Row:
    best, value = run.best_evaluation, run.best_score(run.best_by)
    state = _state(run)
    return Row(
        run=str(run.folder.path),
        name=run.name,
        state=state,
        changed=_changed(run.folder.path),
        recipe=_recipe(run.environment.get("command")),
        model=_text(run.recipe.get("model.name")),
        step=run.steps,
        epoch=_finite(run.epoch),
        length=_text(run.recipe.get("run.length")),
        best_by=run.best_by,
        best=value if 0 <= value <= 1 else None,
        best_step=best.get("step"),
        best_epoch=_finite(number(best, "epoch") or 0.0) if best else None,
        seconds=_finite(run.seconds),
        message=_text(run.history.events[-1].get("message")) if state == "failed" else None,
    )


def _state(run: Run) -> State:
    last_event: Report = run.history.events[-1] if run.history.events else {}
    is_evaluated = bool(run.history.val) and run.history.val[-1]["step"] == run.steps
    if is_evaluated and run.ended_early:
        return "ended early"
    if is_evaluated and (run.share_done() or 0) >= 1:
        return "done"
    if is_locked(run.folder.lock):
        return "training"
    return "failed" if last_event.get("event") in FAILED else "interrupted"


def _changed(path: Path) -> float:
    return max(_mtime(path / name) for name in ("metrics.jsonl", "recipe.toml"))


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _recipe(command: Any) -> str | None:
    """The recipe that a command line names; None for a program that calls the library."""
    words = command if isinstance(command, list) else []
    position = words.index("train") + 1 if "train" in words else len(words)
    name = _text(words[position]) if position < len(words) else None
    return Path(name).stem if name and not name.startswith("-") else None  # options may come first


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _finite(value: float) -> float:
    return value if math.isfinite(value) and 0 <= value < _MOST_SECONDS else 0.0


# --- as text ---


def table_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the table, as texts. Units are in the head, if all rows share them."""
    units, names = {_unit(row) for row in rows}, {METRICS[row.best_by] for row in rows}
    unit, best = (one.pop() if len(one) == 1 else "" for one in (units, names))
    head = ["run", "recipe", "state", unit or "done", best or "best", "at epoch", "time", "changed"]
    return head, [_cells(row, has_unit=not unit, has_name=not best) for row in rows]


def _cells(row: Row, *, has_unit: bool, has_name: bool) -> list[str]:
    changed = _ago(time.time() - row.changed) if row.changed else ""
    if row.state == "unreadable":
        return [row.name, "", row.state, *("" for _ in range(4)), changed]
    amount = amount_of(row.length or "")
    end = float(amount[0]) if amount and amount[1] == "epoch" else math.inf  # steps may exceed it
    done = f"{row.step}" if _unit(row) == "steps" else f"{min(row.epoch, end):.1f}"
    done += f"/{float(amount[0]):g}" if amount and amount[1] != "sample" else ""
    done += f" {_unit(row)}" if has_unit else ""
    best = "" if row.best is None else f"{row.best:.2%}"
    best += f" {METRICS[row.best_by]}" if best and has_name else ""
    at = f"{min(row.best_epoch, end):.1f}" if best and row.best_epoch is not None else ""
    recipe = row.recipe or row.model or ""
    return [row.name, recipe, row.state, done, best, at, duration(row.seconds), changed]


def _unit(row: Row) -> str:
    """The unit of the progress; epochs for a run whose length is not known."""
    amount = amount_of(row.length or "")
    return "steps" if amount and amount[1] == "step" else "epochs"


def _ago(seconds: float) -> str:
    for unit, length in (("d", _DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "now"
