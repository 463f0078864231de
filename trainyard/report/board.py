"""The board of results: tasks, their records over several seeds, and the table of them.

results/TASK/task.toml says what is measured, results/TASK/DATE-NAME/ is a record: `recipe.toml`,
`record.json` and the evaluations of each seed, `seed-N.jsonl`.
"""

import json
import math
import statistics
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainyard.errors import InputError
from trainyard.files import finite
from trainyard.monitor.history import read_history
from trainyard.monitor.reports import Report

BETTER = 0.01
"""Largest p of a new best record."""


class Task(BaseModel):
    """What task.toml holds."""

    model_config = ConfigDict(extra="forbid")

    title: str
    target: float = Field(gt=0, lt=1)
    """Top-1, a fraction of 1."""
    minutes: float = Field(gt=0)
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
    """The task of a folder. InputError if its task.toml is missing or wrong."""
    path = folder / "task.toml"
    try:
        return Task.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: is no TOML ({error})") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {key}: {first['msg'].lower()}") from None


def tasks_in(board: Path) -> list[Path]:
    """The folders of the tasks, by name. InputError if there is none."""
    found = sorted(path.parent for path in board.glob("*/task.toml"))
    if not found:
        raise InputError(
            f"{board}: no board of results: it has no TASK/task.toml; name one, such as the folder "
            "results of a clone of Trainyard, or compare runs by `trainyard report RUN RUN`"
        )
    return found


def records_of(folder: Path) -> list[Record]:
    """The records of a task, the oldest first. InputError for a record that cannot be read."""
    task = read_task(folder)
    return [_record(path.parent, task) for path in sorted(folder.glob("[0-9]*/record.json"))]


def _record(folder: Path, task: Task) -> Record:
    path = folder / "record.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        startup_s = {int(seed): float(value) for seed, value in facts["startup_s"].items()}
        facts["hardware"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path}: is no record: make it with `trainyard results --add`") from None
    seeds = (
        _measured(seed, read_history(folder / f"seed-{seed}.jsonl").val, startup, task)
        for seed, startup in sorted(startup_s.items())
    )
    return Record(folder.name, facts, tuple(seeds))


def _measured(seed: int, evaluations: Sequence[Report], startup_s: float, task: Task) -> Seed:
    if not evaluations:
        raise InputError(
            f"seed {seed} has no evaluation: a record needs the evaluations of its runs"
        )
    if "top1" not in evaluations[-1]:
        raise InputError(f"seed {seed} has no top-1, as its images have lists of labels")
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
        if p is None or p < BETTER:
            best[record.facts["hardware"]] = number
    return [Standing(p, number in best.values()) for number, p in enumerate(chances)]


# --- the table ---

_HEAD = """# Results

Made by `trainyard results`, as [the page on results](../docs/results.md) explains. Times are
wall-clock time from the start of the process to the end of an evaluation; means ± standard
deviations over seeds. p: exact rank-sum test against the best earlier record on the same hardware;
below 0.01 it is the new best. **Bold**: the best of its hardware."""


def as_markdown(board: Path) -> str:
    """The text of the board's README.md."""
    return "\n\n".join([_HEAD, *map(_section, tasks_in(board))]) + "\n"


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


def as_json(board: Path) -> list[dict[str, Any]]:
    """All tasks with their records: seconds, top-1 as fractions of 1, null where not reached."""
    return [
        {
            "task": folder.name,
            **read_task(folder).model_dump(),
            "records": [
                {
                    "record": record.name,
                    **record.facts,
                    "seeds": [
                        {key: finite(value) for key, value in seed._asdict().items()}
                        for seed in record.seeds
                    ],
                }
                for record in records_of(folder)
            ],
        }
        for folder in tasks_in(board)
    ]
