"""A new record on the board of results, from finished runs that differ in the seed alone."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainyard.compare import differences
from trainyard.config import load_recipe
from trainyard.errors import InputError
from trainyard.files import write_text
from trainyard.report.board import read_task, records_of, tasks_in
from trainyard.report.runs import Run, counted, read_runs

_SEED = "run.seed"
_KEPT = ("command", "python", "versions", "git")


def add_record(
    board: Path, folders: Sequence[Path], *, task: str, name: str, hardware: str, note: str
) -> Path:
    """Copy what a record needs from the runs to BOARD/TASK/DATE-NAME. Returns that folder.

    `hardware`: as the runs recorded it if empty. InputError, and nothing written, if a run is
    unfinished or was resumed, or if the runs differ in more than the seed.
    """
    if task not in (names := [path.name for path in tasks_in(board)]):
        raise InputError(f"--task {task}: {board} has {', '.join(names)}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise InputError(f"--name {name!r}: small letters, digits, dots and hyphens, please")
    runs = read_runs(list(folders))
    for run in runs:
        _check(run, runs[0])
    seeds = [int(run.recipe[_SEED]) for run in runs]
    if len(set(seeds)) < len(seeds):
        raise InputError(f"the runs have the seeds {seeds}: each must have its own --run.seed")
    record = board / task / f"{datetime.now(UTC):%Y-%m-%d}-{name}"
    if record.exists():
        raise InputError(f"{record}: exists: choose another --name")
    read_task(board / task)
    with tempfile.TemporaryDirectory(dir=board / task, prefix=".") as part:
        made = Path(part) / "record"
        made.mkdir()
        _write(made, dict(zip(seeds, runs, strict=True)), hardware=hardware, note=note)
        os.rename(made, record)
    records_of(board / task)
    return record


def _check(run: Run, first: Run) -> None:
    """InputError if a run cannot be in one record with the first."""
    path = run.folder.path
    if not run.recipe or not run.history.val or (run.share_done() or 0.0) < 1:
        raise InputError(f"{path}: is not complete: give the command that trains it again")
    if any(event.get("event") == "resumed" for event in run.history.events):
        raise InputError(f"{path}: was resumed: the time of a record is that of one process")
    if run.environment.get("startup_s") is None:
        raise InputError(f"{path}: does not say how long its start took: train it again, on Linux")
    if "ema_decay" in run.history.val[-1]:
        raise InputError(
            f"{path}: the validation images chose among several moving averages: a record needs a "
            "single model.ema_decay"
        )
    changed = differences(
        load_recipe(str(first.folder.recipe)), load_recipe(str(run.folder.recipe))
    )
    changed = [text for text in changed if not text.startswith(f"{_SEED}:")]
    if changed:
        raise InputError(f"{path}: differs from {first.folder.path}: {'; '.join(changed)}")
    for key in ("fingerprints", "versions", "devices", "cpus"):
        if run.environment.get(key) != first.environment.get(key):
            raise InputError(f"{path}: other {key} than {first.folder.path}: make two records")


def _write(record: Path, runs: dict[int, Run], *, hardware: str, note: str) -> None:
    first = next(iter(runs.values()))
    of_run = first.environment
    facts: dict[str, Any] = {
        "hardware": hardware or counted(of_run["devices"]) or f"{of_run['cpus']} CPU cores",
        "note": note,
        **{key: of_run.get(key) for key in _KEPT},
        "startup_s": {str(seed): run.environment["startup_s"] for seed, run in runs.items()},
    }
    facts["command"] = ["trainyard", *of_run["command"][1:]]  # without the path of the program
    write_text(record / "record.json", json.dumps(facts, indent=2) + "\n")
    shutil.copyfile(first.folder.recipe, record / "recipe.toml")
    for seed, run in runs.items():
        lines = (json.dumps(report) + "\n" for report in run.history.val)
        write_text(record / f"seed-{seed}.jsonl", "".join(lines))
