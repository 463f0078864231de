"""Run directories, also of unfinished runs, and groups of runs that repeat one another."""

import json
import math
import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainyard.compare import PRACTICAL, REPEATS
from trainyard.course import amount_of
from trainyard.errors import DataError, InputError
from trainyard.files import RunDirectory, check_run, json_object, read_json
from trainyard.monitor.history import (
    ENDED_EARLY,
    METRICS,
    History,
    best_of,
    number,
    read_history,
    score,
    shows_top5,
)
from trainyard.monitor.reports import Report
from trainyard.training.label_scores import LabelScores
from trainyard.training.recorded import Recorded, load_recorded
from trainyard.training.weight_names import prefix_of

_SEED, _FOLD = REPEATS
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# Parts of environment.json that are no single value.
_ENVIRONMENT = {
    "versions": dict,
    "git": dict,
    "fingerprints": dict,
    "devices": list,
    "command": list,
}


@dataclass(frozen=True)
class Run:
    folder: RunDirectory
    name: str
    history: History
    recipe_text: str  # "" if there is none
    recipe: dict[str, Any]  # by section.key
    environment: dict[str, Any]
    quarantine: tuple[dict[str, Any], ...] = ()
    recorded: Recorded | None = None
    classes: tuple[str, ...] = ()  # until a checkpoint names them
    parameters: int | None = None
    notes: tuple[str, ...] = ()
    """Missing parts, with reasons."""

    @property
    def steps(self) -> int:
        """Number of steps, as far as reported."""
        return int(self._furthest("step"))

    @property
    def seconds(self) -> float:
        """Seconds of the whole run, over all restarts."""
        return self._furthest("time")

    @property
    def epoch(self) -> float:
        return self._furthest("epoch")

    def _furthest(self, key: str) -> float:
        last = [*self.history.train[-1:], *self.history.val[-1:]]
        return max((number(report, key) or 0.0 for report in last), default=0.0)

    def share_done(self) -> float | None:
        """Share of `run.length` that is done, 0 to 1; None if not known."""
        last = [*self.history.train[-1:], *self.history.val[-1:]]
        return max(
            (share for one in last or [{}] if (share := self.share_of(one)) is not None),
            default=None,
        )

    def share_of(self, report: Report) -> float | None:
        """Share of `run.length` that was done at a report, 0 to 1; None if not known."""
        amount, unit = amount_of(str(self.recipe.get("run.length", ""))) or (0, "")
        if not amount or unit == "%":
            return None
        done = number(report, "samples" if unit == "sample" else unit) or 0.0
        return min(done / float(amount), 1.0)

    @property
    def ended_early(self) -> bool:
        """True if the run has ended by run.patience."""
        ends = [event for event in self.history.events if event.get("event") == ENDED_EARLY]
        return bool(ends) and bool(ends[-1]["step"] == self.steps)

    @property
    def best_by(self) -> str:
        """The key of the value that decides the best evaluation."""
        by = str(self.recipe.get("run.best_by"))
        return by if by in METRICS else "top1"

    @property
    def best_evaluation(self) -> Report:
        """That of the checkpoint `best`; {} without one."""
        return best_of(self.history.val, self.best_by)

    @property
    def best_prefix(self) -> str:
        """The prefix of metrics of the weights that are better in it: "", or "ema_"."""
        best = self.best_evaluation
        return max(("", "ema_"), key=lambda prefix: number(best, f"{prefix}{self.best_by}") or -1.0)

    @property
    def num_classes(self) -> int | None:
        """None if neither a checkpoint nor predictions tell."""
        if self.classes:
            return len(self.classes)
        if self.recorded is None or isinstance(self.recorded.scores, LabelScores):
            return None
        return int(self.recorded.labels.max()) + 1

    @property
    def shows_top5(self) -> bool:
        """Also True if the number of classes is not known."""
        return self.num_classes is None or shows_top5(self.num_classes)

    def best_score(self, by: str) -> float:
        """The highest value of the weights or their average; below 0 without one."""
        return max((score(report, by) for report in self.history.val), default=-1.0)

    def best(self, key: str) -> Report | None:
        """The evaluation with the highest `key`; the last if several are equal."""
        reports = [report for report in self.history.val[::-1] if number(report, key) is not None]
        return max(reports, key=lambda report: float(report[key]), default=None)


def read_runs(folders: list[Path]) -> list[Run]:
    """The runs, with the shortest unique names. One of several whose files are no run's has the
    reason in its notes, and nothing else.

    InputError if a folder is no run directory, or given twice, or is the only one and so damaged.
    """
    for folder in folders:
        check_run(folder)
    names = _names([folder.resolve() for folder in folders])
    read = _read if len(folders) == 1 else _read_one_of_several
    return [read(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read_one_of_several(path: Path, name: str) -> Run:
    try:
        return _read(path, name)
    except InputError as error:
        nothing = History([], [], [])
        return Run(RunDirectory(path), name, nothing, "", {}, {}, notes=(str(error),))


def read_brief(path: Path, name: str) -> Run:
    """A run without its predictions, classes, parameters, and all training reports but the last.

    InputError for a folder that is no run directory, or for a file that is not Trainyard's.
    """
    check_run(path)
    return _outline(RunDirectory(path), name, is_brief=True)


def _outline(folder: RunDirectory, name: str, *, is_brief: bool) -> Run:
    history = History([], [], [])
    if folder.metrics.exists():
        history = read_history(folder.metrics, is_brief=is_brief)
    text = folder.recipe.read_text("utf-8", "replace") if folder.recipe.exists() else ""
    return Run(
        folder=folder,
        name=name,
        history=history,
        recipe_text=text,
        recipe=_flat(folder.recipe, text),
        environment=_json(folder.environment),
    )


def _names(paths: list[Path]) -> list[str]:
    """The last parts of each path, as many as make all names unique."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-count:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise InputError(
        "report.run-given-twice",
        "{name}: given twice; name each run once",
        name=max(names, key=names.count),
    )


def _read(path: Path, name: str) -> Run:
    folder, notes = RunDirectory(path), []
    run = _outline(folder, name, is_brief=False)
    try:
        recorded = load_recorded(folder.predictions)
    except DataError as error:
        recorded = None
        notes.append(str(error))
    damaged = [  # has another type than Trainyard's
        key
        for key, value in run.environment.items()
        if value is not None and not isinstance(value, _ENVIRONMENT.get(key, str | float | int))
    ]
    notes += [f"{folder.environment}: {key} is damaged, and left out" for key in damaged]
    if recorded is not None and not recorded.is_of(run.best_evaluation):
        recorded = None
    return replace(
        run,
        environment={key: of for key, of in run.environment.items() if key not in damaged},
        quarantine=_lines(folder.quarantine),
        recorded=recorded,
        classes=_classes(folder),
        parameters=_parameters(folder),
        notes=tuple(notes),
    )


def _flat(path: Path, text: str) -> dict[str, Any]:
    try:
        tree = json_object(json.dumps(tomllib.loads(text)))  # with its bounds
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError("recipe.not-toml", path=path, reason=str(error)) from None
    return {
        f"{section}.{key}": value
        for section, values in tree.items()
        if isinstance(values, dict)
        for key, value in values.items()
    }


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or incomplete."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _lines(path: Path) -> tuple[dict[str, Any], ...]:
    """The objects in a JSON lines file, without an incomplete last line."""
    objects = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
        try:
            objects.append(json_object(line))
        except ValueError:
            continue
    return tuple(objects)


def _checkpoint_file(folder: RunDirectory, name: str) -> Path | None:
    paths = (folder.checkpoints / which / name for which in ("best", "latest"))
    return next((path for path in paths if path.is_file()), None)


def temperature_of(run: Run, prefix: str) -> float:
    """The temperature of a run's best weights with this prefix of metrics; 1 without one."""
    fitted = _json(run.folder.checkpoints / "best" / "temperature.json")
    temperatures = {prefix_of(name): number(fitted, name) for name in fitted}
    return temperatures.get(prefix) or 1.0


def _classes(folder: RunDirectory) -> tuple[str, ...]:
    path = _checkpoint_file(folder, "progress.json")
    names = _json(path).get("classes") if path else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _parameters(folder: RunDirectory) -> int | None:
    """Parameters of the model, from the header of its weights; None if there is no such file."""
    path = _checkpoint_file(folder, "model.safetensors")
    if path is None:
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            names = (name for name in file.keys() if not name.endswith(_BUFFERS))  # noqa: SIM118
            shapes = [file.get_slice(name).get_shape() for name in names]
    except (OSError, SafetensorError):
        return None
    return sum(math.prod(map(int, shape)) for shape in shapes)


def counted(devices: Sequence[object]) -> str:
    """Devices with counts: 8 x NVIDIA H100 80GB HBM3."""
    counts = Counter(map(str, devices))
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


# --- groups ---


@dataclass(frozen=True)
class Group:
    name: str
    runs: tuple[Run, ...]

    @property
    def is_several(self) -> bool:
        return len(self.runs) > 1


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Groups of runs that differ in the seed or the fold alone, in the order of their first runs.

    A run whose seed and fold its group has already gets its own group.
    """
    by_group: dict[str, list[Run]] = {}
    for run in runs:
        key = repr((_what_counts(run), _data(run)))
        is_there = _repeat(run) in map(_repeat, by_group.get(key, ()))
        if not run.recipe or is_there:
            key += f" {run.folder.path}"
        by_group.setdefault(key, []).append(run)
    return [Group(_name(group), tuple(group)) for group in by_group.values()]


def _what_counts(run: Run) -> list[tuple[str, Any]]:
    aside = PRACTICAL.union(REPEATS)  # see _data
    return sorted((key, of) for key, of in run.recipe.items() if key not in aside)


def _data(run: Run) -> object:
    """The identity of a run's data. Folds of one division have the same data."""
    fingerprints = run.environment.get("fingerprints") or {}
    if (fold := run.recipe.get(_FOLD)) is None:
        return [fingerprints.get(split) for split in ("train", "val")]
    both = fingerprints.get("both", run.recipe.get("data.train"))
    return both, str(fold).partition("/")[2]


def _repeat(run: Run) -> list[Any]:
    return [run.recipe.get(key) for key in REPEATS]


def _name(runs: list[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    common = os.path.commonprefix([run.name for run in runs])  # noqa: RUF071  # by letters
    common = common.rstrip("0123456789").removesuffix("seed").rstrip("-_./= ")
    seeds, folds = (len({str(run.recipe.get(key)) for run in runs}) for key in REPEATS)
    what = "folds" if seeds == 1 else "seeds" if folds == 1 else "seeds and folds"
    return f"{common or f'{runs[0].name} … {runs[-1].name}'} ({len(runs)} {what})"


def best_recorded(runs: Sequence[Run]) -> tuple[Run, Recorded, str] | None:
    """The best run among those with predictions, and the key that decides; None without any.

    The value that decides in all of them, or else top-1 or mAP.
    """
    saved = [(run, run.recorded) for run in runs if run.recorded is not None]
    if not saved:
        return None
    kinds = {run.best_by for run, _ in saved}
    key = "top1" if any(run.best("top1") for run, _ in saved) else "map"
    key = kinds.pop() if len(kinds) == 1 else key
    return *max(saved, key=lambda each: each[0].best_score(key)), key


def differences(runs: Iterable[Run]) -> list[tuple[str, list[Any]]]:
    """Recipe keys that differ between runs, with each run's value; None if unset."""
    recipes = [run.recipe for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [(key, [recipe.get(key) for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if any(of != values[0] for of in values)]
