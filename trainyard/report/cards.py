"""Figures at the top of the page: cards for one run, a table for several."""

from collections.abc import Sequence
from statistics import mean, stdev

from trainyard.monitor.reports import Report
from trainyard.report.charts import COLOURS
from trainyard.report.groups import Group
from trainyard.report.markup import Child, Html, join, table, tag
from trainyard.report.runs import Run, counted, number
from trainyard.report.ticks import duration, percent, short


def cards(run: Run) -> Html:
    """Cards with the results of one run."""
    top1, ema = run.best("top1"), run.best("ema_top1")
    share = run.share_done()
    found = [
        _accuracy("Best top-1", top1, "top1", "top5"),
        _accuracy("Best EMA top-1", ema, "ema_top1", "ema_top5"),
        _card("Time", duration(run.seconds), "all restarts together"),
        _card("Images per second", _thousands(speed(run)), _devices_in_words(run)),
        _card("Epochs", f"{run.epoch:.1f}", _done(share, run.steps)),
        _card("Parameters", short(run.parameters) if run.parameters else None, _model(run)),
    ]
    return tag("dl", *found, class_="cards")


def _accuracy(title: str, best: Report | None, key: str, top5: str) -> Html | None:
    if best is None:
        return _card(title, "\N{EM DASH}", "not evaluated yet") if key == "top1" else None
    detail = f"at step {best['step']:,}"
    five = number(best, top5)
    if five is not None:
        detail = f"top-5 {percent(five)}, {detail}"
    return _card(title, percent(best[key]), detail)


def _card(title: str, value: str | None, detail: str) -> Html | None:
    if value is None:
        return None
    return tag(
        "div",
        tag("dt", title),
        tag("dd", tag("span", value, class_="figure"), tag("span", detail, class_="detail")),
        class_="card",
    )


def _thousands(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def speed(run: Run) -> float | None:
    """Images per second in training: the median of reports, without the first tenth."""
    reports = run.history.train[len(run.history.train) // 10 :]
    found = sorted(of for report in reports if (of := number(report, "images_per_s")) is not None)
    return found[len(found) // 2] if found else None


def _done(share: float | None, steps: int) -> str:
    if share is None or share >= 1:
        return f"{steps:,} steps"
    return f"{steps:,} steps, {share:.0%} of the run"


def _model(run: Run) -> str:
    return str(run.recipe.get("model.name", "of the model"))


def _devices_in_words(run: Run) -> str:
    """Number of ranks, and devices of the first rank's node, as far as recorded."""
    found = run.environment.get("devices") or []
    size = next(
        (of for report in reversed(run.history.train) if (of := report.get("world_size"))), None
    )
    ranks = f"{size} ranks" if isinstance(size, int) and size > 1 else ""
    if found:
        kinds = counted(found)
    elif run.environment:
        kinds = f"CPU, {run.environment.get('cpus', '?')} cores"
    else:
        kinds = ""
    return ", ".join(filter(None, (ranks, kinds))) or "while training"


# --- several runs ---


def comparison(groups: Sequence[Group]) -> Html:
    """A row for each run, and one for each group of runs that differ in the seed alone."""
    has_ema = any(run.best("ema_top1") for group in groups for run in group.runs)
    head = ["Run", "Seed", "Best top-1", *(["Best EMA top-1"] if has_ema else []), "Top-5"]
    head += ["Lowest loss", "Epochs", "Time", "Images/s"]
    rows: list[list[Child]] = []
    for place, group in enumerate(groups):
        if group.is_several:
            rows.append(_row(tag("b", _swatch(place), group.name), "all", group.runs, has_ema))
        for run in group.runs:
            name = join(run.name) if group.is_several else join(_swatch(place), run.name)
            seed = str(run.recipe.get("run.seed", ""))
            rows.append(_row(name, seed, (run,), has_ema))
    caption = "Runs; of several seeds the mean and two standard deviations"
    return table(head, rows, caption=caption, numbers=1, class_="runs")


def _swatch(place: int) -> Html:
    return tag("span", class_=f"swatch c{place % COLOURS}")


def _row(name: Html, seed: str, runs: Sequence[Run], has_ema: bool) -> list[Child]:
    def best(key: str) -> str:
        found = [run.best(key) for run in runs]
        return _spread([100 * report[key] for report in found if report], "{:.2f}", "%")

    speeds = [found for run in runs if (found := speed(run)) is not None]
    losses = [found for run in runs if (found := _lowest_loss(run)) is not None]
    return [
        name,
        seed,
        best("top1"),
        *([best("ema_top1")] if has_ema else []),
        best("top5"),
        _spread(losses, "{:.4f}"),
        _spread([run.epoch for run in runs], "{:.1f}", spreads=False),
        duration(mean(run.seconds for run in runs)),
        _spread(speeds, "{:,.0f}"),
    ]


def _lowest_loss(run: Run) -> float | None:
    found = (number(report, "loss") for report in run.history.val)
    return min((loss for loss in found if loss is not None), default=None)


def _spread(values: Sequence[float], form: str, unit: str = "", *, spreads: bool = True) -> str:
    """The mean; for several values with two standard deviations."""
    if not values:
        return "\N{EM DASH}"
    text = form.format(mean(values))
    if len(values) > 1 and spreads:
        text += f" ± {form.format(2 * stdev(values))}"
    return text + (f"\N{NO-BREAK SPACE}{unit}" if unit else "")
