"""Results at the top of the page: cards for one run, a table for several."""

from collections.abc import Iterable, Sequence
from statistics import mean, median_high, stdev

from trainyard.data.storage.credentials import without_secrets
from trainyard.monitor.history import METRICS, PROBE, number
from trainyard.printable import duration, in_millions
from trainyard.report.charts import COLOURS
from trainyard.report.findings import PAGE, findings
from trainyard.report.markup import Child, Html, join, table, tag
from trainyard.report.runs import Group, Run, counted
from trainyard.training.reliability import wilson

_NONE = "\N{EM DASH}"
_COMPARED = ("top1", "ema_top1", "top5", "map", "ema_map")


def overview_section(groups: Sequence[Group]) -> Html:
    """The first section of a report: cards of one run, or a comparison of several."""
    runs = [run for group in groups for run in group.runs]
    notes = (tag("p", note, class_="note") for run in runs for note in _notes(run, len(runs) > 1))
    if len(runs) > 1:
        return join(_comparison(groups), *notes)
    return join(_cards(runs[0]), *notes, _head(runs[0]))


def _head(run: Run) -> Html | None:
    """The head that the run printed when it was started last."""
    heads = [event["rows"] for event in run.history.events if isinstance(event.get("rows"), dict)]
    if not heads:
        return None
    rows: list[list[Child]] = [[name, without_secrets(str(of))] for name, of in heads[-1].items()]
    return table(["", "Value"], rows, caption="The run at its start", class_="facts")


def _notes(run: Run, is_named: bool) -> list[str]:
    of_run = findings(run)
    remarks = [str(e["message"]) for e in run.history.events if e.get("event") == "remark"]
    remarks = [without_secrets(text) for text in dict.fromkeys(remarks)]
    remarks += [f"{' '.join(of_run)} Causes are in {PAGE}."] if of_run else []
    return [*run.notes, *(f"{run.name}: {text}" if is_named else text for text in remarks)]


def _cards(run: Run) -> Html:
    speed, share = _speed(run), run.share_done()
    done = f", {share:.0%} of the run" if share is not None and share < 1 else ""
    done = ", ended early" if run.ended_early else done
    size = run.parameters
    model = str(run.recipe.get("model.name", "of the model"))
    keys = [each for name in (run.best_by, "top1", "map") for each in (name, f"ema_{name}")]
    figures = [card for key in dict.fromkeys(keys) if (card := _accuracy(run, key))]
    cards = [
        *(figures or [_card(_title(run.best_by), _NONE, "not evaluated yet")]),
        _probe(run),
        _card("Time", duration(run.seconds), "all restarts together"),
        _card("Images per second", f"{speed:,.0f}", _devices(run)) if speed else None,
        _card("Epochs", f"{run.epoch:.1f}", f"{run.steps:,} steps{done}"),
        _card("Parameters", in_millions(size), model) if size else None,
    ]
    return tag("dl", *cards, class_="cards")


def _accuracy(run: Run, key: str) -> Html | None:
    best = run.best(key)
    if best is None:
        return None
    prefix, name = ("ema_" if key.startswith("ema_") else ""), key.removeprefix("ema_")
    main = "top1" if "top1" in best else "map"
    second = {"top1": "top5", "map": "macro_f1"}.get(name, main)
    value = number(best, f"{prefix}{second}")
    detail = "" if value is None else f"{METRICS[second]} {value:.2%}, "
    decay = number(best, "ema_decay") if prefix else None
    detail += "" if decay is None else f"decay {decay:g}, "
    count = number(best, "evaluated")
    if name == "top1" and count:
        low, high = wilson(best[key], int(count))
        detail = f"{low:.1%} to {high:.1%} with 95% confidence, {detail}"
    detail += f"at step {best['step']:,}"
    detail += ", the checkpoint best" if best is run.best_evaluation else ""
    return _card(_title(key), f"{best[key]:.2%}", detail)


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
    shown = [key for key in keys if any(run.best(key) for run in runs)] or ["top1"]
    head = ["Run", "Seed", *map(_title, shown), "Lowest loss", "Epochs", "Time", "Images/s"]
    rows: list[list[Child]] = []
    for row, group in enumerate(groups):
        swatch = tag("span", class_=f"swatch c{row % COLOURS}")
        if group.is_several:
            rows.append(_row(tag("b", swatch, group.name), "all", group.runs, shown))
        for run in group.runs:
            name = join(None if group.is_several else swatch, run.name)
            rows.append(_row(name, str(run.recipe.get("run.seed", "")), (run,), shown))
    caption = "Runs; of several seeds or folds the mean and two standard deviations"
    return table(head, rows, caption=caption, numbers=1, class_="runs")


def _row(name: Html, seed: str, runs: Sequence[Run], shown: Iterable[str]) -> list[Child]:
    def best(key: str) -> str:
        return _spread([report[key] for run in runs if (report := run.best(key))], ".2%")

    losses = [_numbers(number(report, "loss") for report in run.history.val) for run in runs]
    return [
        name,
        seed,
        *map(best, shown),
        _spread([min(of_one) for of_one in losses if of_one], ".4f"),
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
