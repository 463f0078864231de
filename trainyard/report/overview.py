"""Results at the top of the page: cards for one run, a table for several."""

from collections.abc import Iterable, Sequence
from statistics import mean, median_high, stdev

from trainyard.monitor.history import METRICS, PROBE, number
from trainyard.printable import duration, how_many, in_millions
from trainyard.report.charts import COLOURS
from trainyard.report.findings import PAGE, findings
from trainyard.report.markup import Child, Html, about, join, table, tag
from trainyard.report.runs import Group, Run, counted
from trainyard.training.reliability import wilson

_NONE = "\N{EM DASH}"
_COMPARED = ("top1", "ema_top1", "top5", "map", "ema_map")


def overview_section(groups: Sequence[Group]) -> Html:
    """The first section of a report: the result of one run, or a comparison of several."""
    runs = [run for group in groups for run in group.runs]
    signs = [text for run in runs for text in _signs(run, len(runs) > 1)]
    box = tag("div", *(tag("p", text) for text in signs), class_="note") if signs else None
    if len(runs) > 1:
        return join(_comparison(groups), box)
    return join(tag("div", _result(runs[0]), _figures(runs[0]), class_="first"), box)


def _signs(run: Run, is_named: bool) -> list[str]:
    """Missing parts, and signs of trouble."""
    of_run = findings(run)
    text = f"{' '.join(of_run)} Causes are in {PAGE}."
    return [*run.notes, *([f"{run.name}: {text}" if is_named else text] if of_run else [])]


def result_of(run: Run) -> tuple[str, str] | None:
    """The value that decides at the best evaluation, and of what it is; None before the first."""
    best, prefix = run.best_evaluation, run.best_prefix
    value, count = number(best, f"{prefix}{run.best_by}"), int(number(best, "evaluated") or 0)
    if value is None:
        return None
    average = " of the moving average (EMA)" if prefix else ""
    images = f" on {how_many(count, 'validation image')}" if count else ""
    return f"{value:.2%}", f"{METRICS[run.best_by]}{average}{images}"


def _result(run: Run) -> Html:
    """The result with its interval."""
    result = result_of(run)
    if result is None:
        return about("Not evaluated yet.")
    line = tag("p", tag("b", result[0], class_="figure"), f" {result[1]}")
    best, by, prefix = run.best_evaluation, run.best_by, run.best_prefix
    count = int(number(best, "evaluated") or 0)
    low, high = wilson(best[f"{prefix}{by}"], count)
    seconds = {"top1": "top5" if run.shows_top5 else "balanced_accuracy", "map": "macro_f1"}
    second = seconds.get(by, "map" if "map" in best else "top1")
    other = number(best, f"{prefix}{second}")
    decay = number(best, "ema_decay") if prefix else None
    unread = 0 if run.recorded is None else int((~run.recorded.scores.is_read()).sum())
    details = (
        f"{low:.1%} to {high:.1%} with 95% confidence" if by == "top1" and count else "",
        "" if other is None else f"{METRICS[second]} {other:.2%}",
        "" if decay is None else f"decay {decay:g}",
        f"{how_many(unread, 'image')} could not be read" if unread else "",
        f"at step {best['step']:,}, the checkpoint best",
    )
    return tag("div", line, about(", ".join(filter(None, details))), class_="result")


def _figures(run: Run) -> Html:
    """Other figures of one run, as a row."""
    speed, share = _speed(run), run.share_done()
    done = f", {share:.0%} of the run" if share is not None and share < 1 else ""
    done = ", ended early" if run.ended_early else done
    size, model = run.parameters, str(run.recipe.get("model.name", "of the model"))
    keys = [each for name in (run.best_by, "top1", "map") for each in (name, f"ema_{name}")]
    keys = [key for key in dict.fromkeys(keys) if key != f"{run.best_prefix}{run.best_by}"]
    others = [(key, best) for key in keys if (best := run.best(key))]
    cards = [
        *(_card(_title(key), f"{of[key]:.2%}", f"at step {of['step']:,}") for key, of in others),
        _probe(run),
        _card("Time", duration(run.seconds), "all restarts together"),
        _card("Images per second", f"{speed:,.0f}", _devices(run)) if speed else None,
        _card("Epochs", f"{run.epoch:.1f}", f"{how_many(run.steps, 'step')}{done}"),
        _card("Parameters", in_millions(size), model) if size else None,
    ]
    return tag("dl", *cards, class_="cards")


def _title(key: str) -> str:
    """The title of a card or column that shows the highest value of `key`."""
    ema = "EMA " if key.startswith("ema_") else ""
    return f"Best {ema}{METRICS[key.removeprefix('ema_')]}"


def _probe(run: Run) -> Html | None:
    """The score before the first step, beside the best one."""
    if not run.history.val or (probe := number(run.history.val[-1], PROBE)) is None:
        return None
    by, best = METRICS[run.best_by], run.best_score(run.best_by)
    return _card("Linear probe", f"{probe:.2%}", f"{by}; after fine-tuning {best:.2%}")


def _card(title: str, value: str, detail: str) -> Html:
    parts = tag("span", value, class_="figure"), tag("span", detail, class_="detail")
    return tag("div", tag("dt", title), tag("dd", *parts), class_="card")


def _speed(run: Run) -> float | None:
    """Images per second in training: the median of reports, without the first tenth."""
    reports = run.history.train[len(run.history.train) // 10 :]
    rates = _numbers(number(report, "images_per_s") for report in reports)
    return median_high(rates) if rates else None


def _devices(run: Run) -> str:
    """Number of ranks, and devices of the first rank's node, as far as recorded."""
    sizes = _numbers(number(report, "world_size") for report in run.history.train)
    ranks = f"{sizes[-1]} ranks" if sizes and sizes[-1] > 1 else ""
    kinds = counted(run.environment.get("devices") or [])
    if not kinds and run.environment:
        kinds = f"CPU, {run.environment.get('cpus', '?')} cores"
    return ", ".join(filter(None, (ranks, kinds))) or "while training"


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# --- several runs ---


def _comparison(groups: Sequence[Group]) -> Html:
    """A row for each run, and one for each group of several."""
    runs = [run for group in groups for run in group.runs]
    kinds = {run.best_by for run in runs}
    first = [f"{prefix}{by}" for by in kinds for prefix in ("", "ema_") if len(kinds) == 1]
    keys = dict.fromkeys([*first, *_COMPARED])
    if not any(run.shows_top5 for run in runs):
        del keys["top5"]
    shown = [key for key in keys if any(run.best(key) for run in runs)] or ["top1"]
    head = ["Run", "Seed", *map(_title, shown), "Loss of the best", "Epochs", "Time", "Images/s"]
    rows: list[list[Child]] = []
    for row, group in enumerate(groups):
        swatch = tag("span", class_=f"swatch c{row % COLOURS}")
        if group.is_several:
            rows.append(_row(tag("b", swatch, group.name), "all", group.runs, shown))
        for run in group.runs:
            name = join(None if group.is_several else swatch, run.name)
            rows.append(_row(name, str(run.recipe.get("run.seed", "")), (run,), shown))
    counts = {int(number(run.best_evaluation, "evaluated") or 0) for run in runs}
    caption = f"{len(runs)} runs"
    if len(counts) == 1 and (count := counts.pop()):
        caption += f", validated on {how_many(count, 'image')}"
    if any(group.is_several for group in groups):
        caption += "; of several seeds or folds the mean and two standard deviations"
    return table(head, rows, caption=caption, numbers=1, class_="runs")


def _row(name: Html, seed: str, runs: Sequence[Run], shown: Iterable[str]) -> list[Child]:
    def best(key: str) -> str:
        return _spread([report[key] for run in runs if (report := run.best(key))], ".2%")

    losses = _numbers(number(run.best_evaluation, f"{run.best_prefix}loss") for run in runs)
    return [
        name,
        seed,
        *map(best, shown),
        _spread(losses, ".4f"),
        f"{mean(run.epoch for run in runs):.1f}",
        duration(mean(run.seconds for run in runs)),
        _spread(_numbers(map(_speed, runs)), ",.0f"),
    ]


def _spread(values: Sequence[float], form: str) -> str:
    """The mean; of several values with two standard deviations."""
    if not values:
        return _NONE
    spread = f" ± {format(2 * stdev(values), form)}" if len(values) > 1 else ""
    return f"{format(mean(values), form)}{spread}"
