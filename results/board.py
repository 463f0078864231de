"""The board of results: its table, and new records on it.

    python results/board.py > results/README.md
    python results/board.py --add RUN ... --task TASK --name NAME

results/TASK/task.toml is what is measured; results/TASK/DATE-NAME/ is a record: `recipe.toml`,
`record.json` and the evaluations of each seed, `seed-N.jsonl`. A task may have an `about.md`, which
follows its table.
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.compare import differences
from trainyard.config import load_recipe
from trainyard.errors import TrainyardError
from trainyard.files import write_text
from trainyard.monitor.history import read_history
from trainyard.monitor.reports import Report
from trainyard.report.runs import Run, counted, read_runs

BOARD = Path(__file__).parent
SIGNIFICANCE = 0.01
"""Largest p of a new best record."""
_SEED = "run.seed"
_FROM_RUN = ("command", "python", "versions", "git")  # of environment.json
_EQUAL = ("fingerprints", "versions", "devices", "cpus")  # in all runs of a record


class BoardError(Exception):
    """A record or a run that the board cannot take; the text says why."""


class Task(NamedTuple):
    """What task.toml holds."""

    title: str
    target: float
    """Top-1, a fraction of 1."""
    minutes: float
    """The time of "accuracy for time"."""
    rules: str


class Seed(NamedTuple):
    """One run of a record. Times are seconds since the start of its process."""

    seed: int
    to_target: float  # to the end of the first evaluation that reached it; infinite if none did
    in_time: float  # top-1 of the last evaluation in time; 0 if there was none
    final: float  # top-1 of the last evaluation


class Record(NamedTuple):
    name: str
    facts: dict[str, Any]  # record.json
    seeds: tuple[Seed, ...]


class Standing(NamedTuple):
    """A record beside the best earlier one of the same hardware."""

    p: float | None  # None for the first
    is_best: bool


def read_task(folder: Path) -> Task:
    """The task of a folder. BoardError if its task.toml is missing or wrong."""
    path = folder / "task.toml"
    try:
        return Task(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:  # TypeError names a key too many or few
        raise BoardError(f"{path}: {error}") from None


def records_of(folder: Path) -> list[Record]:
    """The records of a task, the oldest first. BoardError for a record that cannot be read."""
    task = read_task(folder)
    return [_record(path.parent, task) for path in sorted(folder.glob("[0-9]*/record.json"))]


def _record(folder: Path, task: Task) -> Record:
    path = folder / "record.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        startup_s = {int(seed): float(value) for seed, value in facts["startup_s"].items()}
        facts["hardware"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BoardError(f"{path}: is no record: make it with --add") from None
    seeds = (
        _measured(seed, read_history(folder / f"seed-{seed}.jsonl").val, startup, task)
        for seed, startup in sorted(startup_s.items())
    )
    return Record(folder.name, facts, tuple(seeds))


def _measured(seed: int, evaluations: Sequence[Report], startup_s: float, task: Task) -> Seed:
    if not evaluations or "top1" not in evaluations[-1]:
        raise BoardError(f"seed {seed} has no evaluation with a top-1")
    points = [(startup_s + each["time"], _top1(each)) for each in evaluations]
    reached = (time for time, top1 in points if top1 >= task.target)
    in_time = [top1 for time, top1 in points if time <= 60 * task.minutes]
    return Seed(seed, next(reached, math.inf), in_time[-1] if in_time else 0.0, points[-1][1])


def _top1(evaluation: Report) -> float:
    """Of the moving average if there is one: the test images choose nothing."""
    return float(evaluation["ema_top1" if "ema_top1" in evaluation else "top1"])


# --- comparison ---


def p_value(new: Sequence[float], old: Sequence[float]) -> float:
    """Chance that ranks as low as those of `new` come of one distribution: exact, one-sided.

    The rank-sum test (Wilcoxon 1945, Mann and Whitney 1947) over all ways to deal the values, with
    mean ranks for ties. Values may be infinite.
    """
    values = [*new, *old]
    # Twice the mean rank, which is a whole number.
    ranks = [2 * sum(v < of for v in values) + values.count(of) + 1 for of in values]
    ways: list[dict[int, int]] = [{0: 1}] + [{} for _ in new]  # by number of ranks, and their sum
    for rank in ranks:
        for count in reversed(range(len(new))):
            for total, number in ways[count].items():
                ways[count + 1][total + rank] = ways[count + 1].get(total + rank, 0) + number
    seen = sum(ranks[: len(new)])
    as_low = sum(number for total, number in ways[-1].items() if total <= seen)
    return as_low / math.comb(len(values), len(new))


def standings(records: Sequence[Record], value: Callable[[Seed], float]) -> list[Standing]:
    """Each record beside the best before it on its hardware; a lower `value` is better."""
    best: dict[str, int] = {}
    chances: list[float | None] = []
    for number, record in enumerate(records):
        before = best.get(record.facts["hardware"])
        values = list(map(value, record.seeds))
        p = None if before is None else p_value(values, list(map(value, records[before].seeds)))
        chances.append(p)
        if p is None or p < SIGNIFICANCE:
            best[record.facts["hardware"]] = number
    return [Standing(p, number in best.values()) for number, p in enumerate(chances)]


# --- the table ---

_HEAD = """# Results

A folder per task, in it a folder per record: a recipe with the evaluations of several seeds,
versions and hardware. `python results/board.py > results/README.md` makes this page.

- **Time to accuracy**: wall-clock time from the start of the process (`startup_s` of
  `environment.json`) to the end of the first evaluation that reaches the task's target. Imports,
  compilation and all evaluations count; preparing the data and its index does not.
- **Accuracy for time**: top-1 of the last evaluation within the task's minutes.

Means ± standard deviations over seeds. p: exact one-sided rank-sum test against the best earlier
record on the same hardware, over all ways to deal the seeds to the two; below 0.01 it is the new
best. **Bold**: the best of its hardware. A seed that never reaches the target counts as the
slowest. Five seeds against five can reach p = 0.004; three against three only 0.05.

A new record, of finished runs that differ in the seed alone and were not resumed:

    for seed in 0 1 2 3 4; do
        trainyard train fashion-mnist --run runs/fm-$seed --run.seed $seed
    done
    python results/board.py --add runs/fm-* --task fashion-mnist --name mine --note "idle"

A new task is a folder with `task.toml`: `title`, `target`, `minutes` and `rules`."""


def as_markdown(board: Path) -> str:
    """The text of the board's README.md."""
    return "\n\n".join([_HEAD, *map(_section, _tasks_in(board))]) + "\n"


def _tasks_in(board: Path) -> list[Path]:
    return sorted(path.parent for path in board.glob("*/task.toml"))


def _section(folder: Path) -> str:
    task, records = read_task(folder), records_of(folder)
    about = folder / "about.md"
    parts = [f"## {task.title}", task.rules.strip()]
    parts += [_table(task, records, folder.name)] if records else ["No record yet."]
    parts += [about.read_text(encoding="utf-8").strip()] if about.exists() else []
    return "\n\n".join(parts)


def _table(task: Task, records: Sequence[Record], folder: str) -> str:
    names = [
        *("record", "hardware", "seeds", f"time to {task.target:.1%}", "p"),
        *(f"top-1 in {task.minutes:g} min", "p", "top-1 at the end", "remarks"),
    ]
    times = standings(records, lambda seed: seed.to_target)
    accuracies = standings(records, lambda seed: -seed.in_time)
    rows = [names, ["---"] * len(names)]
    for record, time, accuracy in zip(records, times, accuracies, strict=True):
        rows.append(
            [
                f"[{record.name}]({folder}/{record.name})",
                str(record.facts["hardware"]),
                str(len(record.seeds)),
                *_cells(_seconds([seed.to_target for seed in record.seeds]), time),
                *_cells(_percent([seed.in_time for seed in record.seeds]), accuracy),
                _percent([seed.final for seed in record.seeds]),
                str(record.facts.get("note", "")),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(text: str, standing: Standing) -> tuple[str, str]:
    p = "" if standing.p is None else f"{standing.p:.2g}"
    return f"**{text}**" if standing.is_best else text, p


def _seconds(values: Sequence[float]) -> str:
    reached = [value for value in values if value < math.inf]
    if len(reached) < len(values):
        return f"{len(reached)} of {len(values)} seeds"
    return f"{statistics.mean(reached):.0f}{_spread(reached, '.0f')} s"


def _percent(values: Sequence[float]) -> str:
    shares = [100 * value for value in values]
    return f"{statistics.mean(shares):.2f}{_spread(shares, '.2f')}%"


def _spread(values: Sequence[float], form: str) -> str:
    return f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""


# --- a new record ---


def add_record(
    board: Path, folders: Sequence[Path], *, task: str, name: str, hardware: str, note: str
) -> Path:
    """Copy what a record needs from the runs to BOARD/TASK/DATE-NAME. Returns that folder.

    `hardware`: as the runs recorded it if empty. BoardError, and nothing written, if a run is
    unfinished or was resumed, or if the runs differ in more than the seed.
    """
    if task not in (names := [path.name for path in _tasks_in(board)]):
        raise BoardError(f"--task {task}: {board} has {', '.join(names)}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise BoardError(f"--name {name!r}: small letters, digits, dots and hyphens, please")
    runs = read_runs(list(folders))
    for run in runs:
        _check(run, runs[0])
    seeds = [int(run.recipe[_SEED]) for run in runs]
    if len(set(seeds)) < len(seeds):
        raise BoardError(f"the runs have the seeds {seeds}: each must have its own --run.seed")
    record = board / task / f"{datetime.now(UTC):%Y-%m-%d}-{name}"
    if record.exists():
        raise BoardError(f"{record}: exists: choose another --name")
    with tempfile.TemporaryDirectory(dir=board / task, prefix=".") as part:
        made = Path(part) / "record"
        made.mkdir()
        _write(made, dict(zip(seeds, runs, strict=True)), hardware=hardware, note=note)
        _record(made, read_task(board / task))
        os.rename(made, record)
    return record


def _check(run: Run, first: Run) -> None:
    """BoardError if a run cannot be in one record with the first."""
    path = run.folder.path
    if not run.recipe or not run.history.val or (run.share_done() or 0.0) < 1:
        raise BoardError(f"{path}: is not complete: give the command that trains it again")
    if any(event.get("event") == "resumed" for event in run.history.events):
        raise BoardError(f"{path}: was resumed: the time of a record is that of one process")
    if run.environment.get("startup_s") is None:
        raise BoardError(f"{path}: has no time of its start, startup_s: train it again, on Linux")
    if "ema_decay" in run.history.val[-1]:
        raise BoardError(
            f"{path}: the validation images chose among several moving averages: a record needs a "
            "single model.ema_decay"
        )
    of_first, of_run = (load_recipe(str(each.folder.recipe)) for each in (first, run))
    changed = [text for text in differences(of_first, of_run) if not text.startswith(f"{_SEED}:")]
    if changed:
        raise BoardError(f"{path}: differs from {first.folder.path}: {'; '.join(changed)}")
    for key in _EQUAL:
        if run.environment.get(key) != first.environment.get(key):
            raise BoardError(f"{path}: other {key} than {first.folder.path}: make two records")


def _write(record: Path, runs: dict[int, Run], *, hardware: str, note: str) -> None:
    first = next(iter(runs.values()))
    of_run = first.environment
    facts: dict[str, Any] = {
        "hardware": hardware or counted(of_run["devices"]) or f"{of_run['cpus']} CPU cores",
        "note": note,
        **{key: of_run.get(key) for key in _FROM_RUN},
        "startup_s": {str(seed): run.environment["startup_s"] for seed, run in runs.items()},
    }
    facts["command"] = ["trainyard", *of_run["command"][1:]]  # without the path of the program
    write_text(record / "record.json", json.dumps(facts, indent=2) + "\n")
    shutil.copyfile(first.folder.recipe, record / "recipe.toml")
    for seed, run in runs.items():
        lines = (json.dumps(report) + "\n" for report in run.history.val)
        write_text(record / f"seed-{seed}.jsonl", "".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", nargs="+", metavar="RUN", type=Path, help="a new record of these")
    parser.add_argument("--task", help="a folder of the board")
    parser.add_argument("--name", help="the record is the folder TASK/DATE-NAME")
    parser.add_argument("--hardware", default="", help="default: as the runs recorded it")
    parser.add_argument("--note", default="", help="remarks, such as the load of the machine")
    options = parser.parse_args()
    try:
        if not options.add:
            print(as_markdown(BOARD), end="")
        elif not options.task or not options.name:
            parser.error("--add needs --task and --name")
        else:
            of = {key: getattr(options, key) for key in ("task", "name", "hardware", "note")}
            print(add_record(BOARD, options.add, **of))
    except (BoardError, TrainyardError) as error:
        print(f"board.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
