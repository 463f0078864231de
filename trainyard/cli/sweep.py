"""`trainyard sweep`: a run for each combination of values of recipe keys."""

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.arguments import positive
from trainyard.cli.options import add_json, loading
from trainyard.cli.printing import print_text
from trainyard.cli.runs import print_runs
from trainyard.cli.train import OUTPUT_MODES, config_of
from trainyard.data.storage.credentials import without_secrets
from trainyard.errors import RecipeError, TrainyardError
from trainyard.launch.job import Job, job_of, shown
from trainyard.launch.launcher import num_gpus
from trainyard.launch.signals import stopped_by
from trainyard.printable import print_line, printable

if TYPE_CHECKING:
    from trainyard.config import RunConfig
    from trainyard.launch.sweep import End
    from trainyard.report.listing import Row

_CLOSES = {"[": "]", "{": "}", "(": ")"}
_MOST_LETTERS = 40  # of a value in the name of a folder
_TRIES = 100  # for each combination that is drawn
_DONE = ("done", "ended early")


class Combination(NamedTuple):
    """One run of a sweep."""

    name: str
    """The name of its folder: the values of the keys that vary."""
    overrides: dict[str, str]
    repeats: str
    """The values that vary, without seed and fold: runs with the same text repeat one another."""


class Mean(NamedTuple):
    """The mean of runs that differ in the seed or the fold alone."""

    name: str
    """The other values that vary; "" if there are none."""
    runs: int
    best_by: str
    mean: float
    standard_error: float


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard sweep` to its parser."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a built-in name or a path to a TOML file")
    add("--data", metavar="LOCATION", action="append", help="as of trainyard train")
    add("--runs", metavar="DIR", help="folder of the runs (runs/NAME-sweep)")
    text = "draw N combinations, of ranges too: --optim.lr log:1e-4..1e-2 or uniform:0..0.3"
    add("--trials", metavar="N", type=positive, help=text)
    text = "let the better half of the runs go on, after each of several parts of the training"
    add("--halve", action="store_true", help=text)
    add("--dry-run", action="store_true", help="print what would be started")
    add_json(parser)
    modes = parser.add_mutually_exclusive_group()
    for name in ("quiet", "plain"):
        modes.add_argument(f"--{name}", action="store_true", help=OUTPUT_MODES[name])
    parser.epilog = (
        "Recipe keys take several values, separated by commas: --optim.lr 1e-3,3e-3. A list among "
        "them has brackets, a text with commas quotes. The same command goes on with a sweep. Of "
        "runs that differ in data.val_fold or run.seed alone it ends with the mean and its "
        "standard error: --data.val_fold 1/5,2/5,3/5,4/5,5/5 is a cross-validation."
    )
    parser.set_defaults(run_command=sweep, takes_overrides=True)


def sweep(options: argparse.Namespace) -> int:
    """Run `trainyard sweep`. Returns the exit code."""
    runs = combinations(options.overrides, options.trials)
    each = [argparse.Namespace(**vars(options) | {"overrides": run.overrides}) for run in runs]
    configs = [*map(config_of, each)]
    _check_parts(runs, configs)
    parent = Path(options.runs or Path("runs") / f"{Path(options.recipe).stem}-sweep")
    jobs = [
        job_of(one, parent / run.name, ("quiet", "plain"))
        for one, run in zip(each, runs, strict=True)
    ]
    if options.dry_run:
        for job in jobs:
            print(shown(job.command))
        return 0
    is_left = [not _is_done(job.run, config) for job, config in zip(jobs, configs, strict=True)]
    left = [job for job, is_open in zip(jobs, is_left, strict=True) if is_open]
    if len(left) < len(jobs):
        print_line(f"{len(jobs) - len(left)} of {len(jobs)} runs are complete already")
    settings = {job: run.repeats for job, run in zip(jobs, runs, strict=True)}
    runs_of = partial(_halved, settings, configs) if options.halve else partial(_run, left)
    failed, received = runs_of(options) if left else ({}, None)
    rows = _rows([job.run for job in jobs])
    repeats = {str(job.run): run.repeats for job, run in zip(jobs, runs, strict=True)}
    _show(rows, means_of(rows, repeats), parent, options)
    if received is not None:
        print_line("stopped: the same command goes on")
        return stopped_by(received).exit_code
    if failed:
        names = ", ".join(f"{name} (exit code {code})" for name, code in failed.items())
        raise TrainyardError(
            "sweep.failed",
            "{num_failed} of {num} runs have failed: {runs}; the same command tries them again",
            num_failed=len(failed),
            num=len(jobs),
            runs=names,
        )
    for job, config in zip(jobs, configs, strict=True) if left else ():
        _is_done(job.run, config)  # not of data that have changed since
    return 0


# --- the combinations ---


def combinations(overrides: Mapping[str, str], trials: int | None = None) -> list[Combination]:
    """A run for each combination of values, the last key varying fastest, or for each of `trials`
    that are drawn: more of them have the same ones first.

    RecipeError if no key has several values, or a list among them has no brackets.
    """
    from trainyard.compare import REPEATS

    values = {key: values_of(key, text) for key, text in overrides.items()}
    ranges = {key: found for key, texts in values.items() if (found := _range(key, texts[0]))}
    varied = [key for key, texts in values.items() if len(texts) > 1 or key in ranges]
    if ranges and trials is None:
        key = next(iter(ranges))
        raise RecipeError(
            "sweep.range-without-trials",
            "--{key} {value}: is a range, of which --trials N draws N values",
            key=key,
            value=values[key][0],
        )
    if not varied:
        raise RecipeError(
            "sweep.nothing-varies",
            "no key has several values: separate them by commas, --optim.lr 1e-3,3e-3 say",
        )
    names = [key.partition(".")[2] for key in varied]
    labels = [
        short if names.count(short) == 1 else key for short, key in zip(names, varied, strict=True)
    ]
    by_name: dict[str, Combination] = {}
    every = product(*values.values()) if trials is None else _drawn(values, ranges, trials)
    for chosen in every:
        by_key = dict(zip(values, chosen, strict=True))
        parts = [(label, by_key[key]) for label, key in zip(labels, varied, strict=True)]
        name = _unique(",".join(f"{label}={_in_name(value)}" for label, value in parts), by_name)
        beside = (f"{key}={by_key[key]}" for key in varied if key not in REPEATS)
        by_name[name] = Combination(name, by_key, ", ".join(beside))
    return [*by_name.values()]


def _range(key: str, text: str) -> tuple[bool, float, float] | None:
    """Whether a range is logarithmic, and its limits; None for a value. RecipeError if wrong."""
    kind, colon, limits = text.partition(":")
    if kind not in ("log", "uniform") or not colon:
        return None
    try:
        low, high = map(float, limits.split(".."))
    except ValueError:
        low = high = 0.0
    if not (kind == "uniform" or low > 0) or not low < high:
        raise RecipeError(
            "sweep.bad-range",
            "--{key} {value}: write log:LOW..HIGH, above 0, or uniform:LOW..HIGH",
            key=key,
            value=text,
        )
    return kind == "log", low, high


def _drawn(
    values: Mapping[str, Sequence[str]],
    ranges: Mapping[str, tuple[bool, float, float]],
    trials: int,
) -> Iterator[tuple[str, ...]]:
    """Combinations, each another one; fewer than `trials` if there are no more."""
    seen = set[tuple[str, ...]]()
    for number in range(_TRIES * trials):
        chosen = tuple(
            _draw(Random(f"{number} {key}"), texts, ranges.get(key))
            for key, texts in values.items()
        )
        if chosen not in seen:
            yield chosen
        seen.add(chosen)
        if len(seen) == trials:
            return


def _draw(random: Random, texts: Sequence[str], limits: tuple[bool, float, float] | None) -> str:
    if limits is None:
        return random.choice(texts)
    is_log, low, high = limits
    value = (
        math.exp(random.uniform(math.log(low), math.log(high)))
        if is_log
        else random.uniform(low, high)
    )
    is_whole = texts[0].partition(":")[2].replace("..", "").isdigit()
    return str(round(value)) if is_whole else f"{value:.4g}"


def values_of(key: str, text: str) -> list[str]:
    """The values of a key: parts between commas that are in no brackets and no quotes.

    RecipeError for several values of a key of lists, unless each has brackets.
    """
    from trainyard.config import is_list

    parts = list(dict.fromkeys(_parts(text)))
    if len(parts) > 1 and is_list(key) and not all(part.startswith("[") for part in parts):
        raise RecipeError(
            "sweep.list-without-brackets",
            "--{key} {value}: each value is a list: write it in brackets, [0.5,1.0],[0.7,1.0] say",
            key=key,
            value=text,
        )
    return [part[1:-1] if _is_quoted(part) else part for part in parts]


def _parts(text: str) -> Iterator[str]:
    ends: list[str] = []  # of the brackets and the quotes that are open
    begin = 0
    for position, letter in enumerate(text):
        if ends and letter == ends[-1]:
            ends.pop()
        elif ends and ends[-1] in "\"'":
            continue
        elif letter in _CLOSES or (letter in "\"'" and (ends or not text[begin:position].strip())):
            ends.append(_CLOSES.get(letter, letter))
        elif letter == "," and not ends:
            yield text[begin:position].strip()
            begin = position + 1
    yield text[begin:].strip()


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] in "\"'" and text[0] == text[-1]


def _in_name(value: str) -> str:
    """A value as a part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", value).strip("_")[-_MOST_LETTERS:] or "_"


def _unique(name: str, others: Mapping[str, object]) -> str:
    count = 2
    unique = name
    while unique in others:
        unique = f"{name}-{count}"
        count += 1
    return unique


def _check_parts(runs: Sequence[Combination], configs: "Sequence[RunConfig]") -> None:
    """RecipeError if parts of the training data vary, and other data validates."""
    for key in ("data.val_fold", "data.val_share"):
        if len({run.overrides.get(key) for run in runs}) < 2:
            continue
        for run, config in zip(runs, configs, strict=True):
            if config.data.val is not None and "data.val" in run.overrides:
                from trainyard.data.open_datasets import source_of

                raise RecipeError(
                    "recipe.val-share-beside-val-data",
                    key=key,
                    value=run.overrides[key],
                    locations="the command line",
                    val=source_of(config.data, "val"),
                )


# --- the runs ---


def _is_done(run: Path, config: "RunConfig") -> bool:
    """True for a complete run; others are for `trainyard train`.

    CheckpointError or DataError for a complete run of another recipe or other data, as in `train`.
    """
    from trainyard.files import RunDirectory, is_run

    if not is_run(run) or _rows([run])[0].state not in _DONE:
        return False
    from trainyard.data.open_datasets import open_datasets
    from trainyard.run.pretrained import resumed_weights, with_pixels
    from trainyard.run.resume import check_same
    from trainyard.world import World

    folder = RunDirectory(run)
    config = with_pixels(config, resumed_weights(config.run.resume, folder))
    data = open_datasets(config.data, World(), lambda *_: None)
    check_same(folder, config, data.fingerprints)
    return True


def _halved(
    settings: Mapping[Job, str], configs: "Sequence[RunConfig]", options: argparse.Namespace
) -> tuple[dict[str, int], int | None]:
    """As `_run`, but after each part of the training the better half of the settings goes on."""
    from trainyard.report.halving import better_half, score_at, shares

    for config in configs:
        _check_halves(config)
    left, failed = [*dict.fromkeys(settings.values())], dict[str, int]()
    for share in shares(len(left)):
        jobs = [job for job, setting in settings.items() if setting in left]
        some, received = _run(
            [job for job in jobs if score_at(job.run, share) is None], options, share
        )
        failed |= some
        if received is not None or share == 1:
            return failed, received
        scores = {
            one: [score_at(job.run, share) for job in jobs if settings[job] == one] for one in left
        }
        left = better_half(scores)
        on = f"{len(left)} of {len(scores)} go on: {'; '.join(left)}"
        print_line(f"after {share:.4g} of the training {on}")
    return failed, None


def _check_halves(config: "RunConfig") -> None:
    """RecipeError for a run that is not evaluated before its end."""
    from trainyard.course import amount_of

    every, length = amount_of(config.run.eval_every), amount_of(config.run.length)
    if length is None or length[1] == "%" or (every is not None and not every[0]):
        raise RecipeError(
            "sweep.halve-without-evaluations",
            "--halve: run.eval_every = {every!r}, run.length = {length!r}: it compares evaluations "
            "before the end, at shares of a length in epochs, steps or samples",
            every=config.run.eval_every,
            length=config.run.length,
        )


def _run(
    jobs: Sequence[Job], options: argparse.Namespace, share: float = 1.0
) -> tuple[dict[str, int], int | None]:
    """The exit codes of runs that failed, by name, and the number of a signal that ended all.

    `share`: of the training, after which a run is stopped.
    """
    from trainyard.launch.sweep import gpus, run_jobs
    from trainyard.report.halving import score_at

    if not jobs:
        return {}, None
    with loading():
        count = num_gpus()
    devices = gpus(count)[: len(jobs)] if count > 1 else [""]
    failed: dict[str, int] = {}

    def on_start(number: int) -> None:
        print_line(f"run {number + 1} of {len(jobs)}: {jobs[number].name}")

    def on_end(end: "End") -> None:
        name = jobs[end.number].name
        if end.code:
            failed[name] = end.code
            print_line(f"{name} has ended with exit code {end.code}")
        elif len(devices) > 1:
            print_line(f"{name} is complete" if share == 1 else f"{name} waits")

    def is_enough(number: int) -> bool:
        return score_at(jobs[number].run, share) is not None

    is_quiet = options.json or len(devices) > 1
    received = run_jobs(
        jobs,
        devices,
        is_quiet=is_quiet,
        on_start=on_start,
        on_end=on_end,
        is_enough=is_enough if share < 1 else None,
    )
    return failed, received


def _rows(runs: Sequence[Path]) -> "list[Row]":
    """The rows of those runs that have begun, the best first."""
    from trainyard.files import is_run
    from trainyard.report.listing import list_runs, sorted_rows

    return sorted_rows([row for run in runs if is_run(run) for row in list_runs(run)])


def means_of(rows: "Sequence[Row]", repeats: Mapping[str, str]) -> list[Mean]:
    """The means of complete runs whose folders have the same text in `repeats`, the best first."""
    by_setting: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.state in _DONE and row.best is not None:
            by_setting.setdefault((repeats[row.run], row.best_by), []).append(row.best)
    means = [
        Mean(name, len(of), best_by, fmean(of), stdev(of) / len(of) ** 0.5)
        for (name, best_by), of in by_setting.items()
        if len(of) > 1
    ]
    return sorted(means, key=lambda each: -each.mean)


def _show(
    rows: "Sequence[Row]", means: Sequence[Mean], parent: Path, options: argparse.Namespace
) -> None:
    """Print the table, and write the report. What prevents a report is printed."""
    report: str | None = None
    if rows:
        from trainyard.monitor.history import METRICS
        from trainyard.report.page import write_report

        try:
            report = str(write_report([Path(row.run) for row in rows], parent / "report.html"))
        except Exception as error:  # of any kind: the table of days of training is still to come
            print_line(f"no report ({error})")
    if options.json:
        result: dict[str, Any] = {
            "runs": [asdict(row) for row in rows],
            "means": [one._asdict() for one in means],
            "report": report,
        }
        print(without_secrets(json.dumps(result)))
    elif rows:
        print_runs(rows)
        for one in means:
            caption = f"the mean of {one.runs} runs and its standard error"
            value = f"{METRICS[one.best_by]} {one.mean:.2%} ± {one.standard_error:.2%}, {caption}"
            print_text(without_secrets(f"{one.name}: {value}" if one.name else value))
        if report is not None:
            print(printable(f"the report on all: {report}"))
