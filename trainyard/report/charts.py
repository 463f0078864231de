"""The charts of the page: their curves as data for charts.js, and their values as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trainyard.report.curves import Curve, Floats, axes_of, curve_of, extremes
from trainyard.report.markup import Child, Html, join, switch, table, tag
from trainyard.report.runs import Group

COLOURS = 7  # colours in the style sheet, distinct for colour-blind readers too
_POINTS = 1000  # per curve
_MOST = 6000  # in one chart, over all runs' curves
_TABLE = 40  # points per curve in the table below a chart
_DOTS = 60  # a longer curve of evaluations has no dots
_IN_DATA = ("name", "title", "form", "from_zero", "has_log", "is_large")  # fields of a chart
_MARKS = 50  # events marked in a chart, the latest


class Series(NamedTuple):
    name: str
    group: int
    colour: int
    is_noisy: bool  # drawn faintly, with its smoothed curve on top
    is_dashed: bool
    has_dots: bool
    curve: Curve


@dataclass(frozen=True)
class Chart:
    name: str  # an id
    title: str
    form: str  # Python's format of a value; charts.js knows the types f, g and %
    curves: Mapping[str, str]  # names of the curves, by kind.key of their reports
    from_zero: bool = False
    has_log: bool = False  # True if the switch for logarithmic axes applies
    is_large: bool = False
    scale: float = 1.0  # from the unit of the reports to that of the title
    series: tuple[Series, ...] = ()


_EMA = "EMA"
_COLOUR_OF = {"validation": 1, _EMA: 2}  # in charts of one run; others have colour 0
_LOSS = {"train.loss": "train", "val.loss": "validation", "val.ema_loss": _EMA}
_TOP1 = {"train.top1": "train", "val.top1": "validation", "val.ema_top1": _EMA}
_TOP5 = {"val.top5": "validation", "val.ema_top5": _EMA}
_BALANCED = {"val.balanced_accuracy": "validation", "val.ema_balanced_accuracy": _EMA}
_F1 = {"val.macro_f1": "validation", "val.ema_macro_f1": _EMA}
_MAP = {"val.map": "validation", "val.ema_map": _EMA}
_MICRO_F1 = {"val.micro_f1": "validation", "val.ema_micro_f1": _EMA}
_SPEED, _WAIT = {"train.images_per_s": "all devices"}, {"train.data_wait": "share of the time"}
_MFU, _USE = {"train.mfu": "of the peak"}, {"train.gpu_use": "share of the time"}
_MEMORY, _POWER = {"train.memory": "peak, first rank"}, {"train.gpu_power": "first device"}
_DISTANCE = {"val.consensus_distance": "distance"}
_CHARTS = (
    Chart("loss", "Loss", ".4f", _LOSS, has_log=True, is_large=True),
    Chart("top1", "Top-1 accuracy", ".2%", _TOP1, is_large=True),
    Chart("top5", "Top-5 accuracy", ".2%", _TOP5),
    Chart("map", "Mean average precision", ".2%", _MAP, is_large=True),
    Chart("micro-f1", "Micro-F1", ".2%", _MICRO_F1),
    Chart("balanced", "Balanced accuracy", ".2%", _BALANCED),
    Chart("f1", "Macro-F1", ".2%", _F1),
    Chart("lr", "Learning rate", ".3g", {"train.lr": "rate"}, from_zero=True),
    Chart("grad-norm", "Gradient norm", ".4g", {"train.grad_norm": "norm"}, has_log=True),
    Chart("speed", "Images per second", ",.0f", _SPEED, from_zero=True),
    Chart("wait", "Waiting for data", ".2%", _WAIT, from_zero=True),
    Chart("mfu", "Model FLOPs utilisation", ".2%", _MFU, from_zero=True),
    Chart("use", "Device in use", ".2%", _USE, from_zero=True),
    Chart("memory", "Memory, GB", ".3g", _MEMORY, from_zero=True, scale=1e-9),
    Chart("power", "Power, watts", ".4g", _POWER, from_zero=True),
    Chart("distance", "Distance of replicas from their mean", ".3g", _DISTANCE),
)


def charts_of(groups: Sequence[Group]) -> list[Chart]:
    """Charts with data. With several groups, training and validation have separate charts."""
    charts = list(_CHARTS)
    if len(groups) > 1:
        charts = [part for chart in charts for part in _by_kind(chart)]
    if not any(run.shows_top5 for group in groups for run in group.runs):
        charts = [chart for chart in charts if chart.curves is not _TOP5]
    drawn = [replace(chart, series=_series(chart, groups)) for chart in charts]
    return [chart for chart in drawn if chart.series]


def _by_kind(chart: Chart) -> list[Chart]:
    kinds = list(dict.fromkeys(key.partition(".")[0] for key in chart.curves))
    if len(kinds) == 1:
        return [chart]
    return [
        replace(
            chart,
            name=f"{chart.name}-{kind}",
            title=f"{chart.title}, {'train' if kind == 'train' else 'validation'}",
            curves={key: of for key, of in chart.curves.items() if key.startswith(kind)},
        )
        for kind in kinds
    ]


def _series(chart: Chart, groups: Sequence[Group]) -> tuple[Series, ...]:
    """One group's curves differ in colour; of several groups, each has a colour."""
    lines = []
    count = max(min(_POINTS, _MOST // len(groups)), 100)
    for number, group in enumerate(groups):
        for path, role in chart.curves.items():
            curve = curve_of(group, path, count, chart.scale)
            if curve is None:
                continue
            name, colour = role, _COLOUR_OF.get(role, 0)
            if len(groups) > 1:
                name = f"{group.name}, {role}" if role == _EMA else group.name
                colour = number % COLOURS
            is_noisy = path.startswith("train.") and path != "train.lr"
            has_dots = path.startswith("val.") and len(curve.drawn.steps) <= _DOTS
            lines.append(Series(name, number, colour, is_noisy, role == _EMA, has_dots, curve))
    return tuple(lines)


# --- data for charts.js ---


def chart_data(charts: Sequence[Chart], groups: Sequence[Group]) -> dict[str, Any]:
    """The charts as plain values for JSON, rounded to visible precision."""
    axes = [axes_of(group)._asdict() for group in groups]
    return {
        "axes": [{name: _rounded(values, 9) for name, values in each.items()} for each in axes],
        "marks": _marks(groups),
        "charts": [
            {key: getattr(chart, key) for key in _IN_DATA}
            | {"series": [_series_data(series) for series in chart.series]}
            for chart in charts
        ],
    }


def _series_data(series: Series) -> dict[str, Any]:
    entry = series._asdict()
    curve: Curve = entry.pop("curve")
    entry |= {"steps": _rounded(curve.drawn.steps, 9), "values": _rounded(curve.drawn.values)}
    if curve.means.steps is not curve.drawn.steps:
        steps, values = curve.means
        entry["means"] = {"steps": _rounded(steps, 9), "values": _rounded(values)}
    if curve.band:
        entry["band"] = {"low": _rounded(curve.band[0]), "high": _rounded(curve.band[1])}
    return entry


def _rounded(values: Floats, digits: int = 6) -> list[float]:
    rounded = (float(f"{value:.{digits}g}") for value in values.tolist())
    return [int(value) if value == int(value) else value for value in rounded]


def _marks(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Events of a single run, at their steps; none for several runs."""
    if len(groups) > 1 or groups[0].is_several:
        return []
    return [
        {"step": event["step"], "text": str(event.get("event", ""))}
        for event in groups[0].runs[0].history.events
        if event["step"] and event.get("event") not in ("bounds", "head", "remark")
    ][-_MARKS:]


# --- the section of the page ---


def curves_section(charts: Sequence[Chart]) -> Html:
    """Places for the charts, below switches that apply to all; a table under each."""
    log = tag("label", tag("input", type="checkbox", name="log"), "Logarithmic loss and norms")
    slider = tag("input", type="range", name="smoothing", min=0, max=100, step=1)
    smoothing = tag("label", "Smoothing ", slider, tag("span", id="smoothing-value"))
    axes = switch("x", "Against", {"steps": "Steps", "epochs": "Epochs", "seconds": "Time"})
    note = "Charts need JavaScript. The tables hold the values without it."
    return join(
        tag("noscript", tag("p", note, class_="note")),
        tag("div", axes, smoothing, log, class_="tools"),
        tag("div", *map(_figure, charts), class_="charts", id="charts"),
    )


def _figure(chart: Chart) -> Html:
    title = tag("span", f": {chart.title}", class_="hidden")
    values = tag(
        "details", tag("summary", "As a table", title), _table(chart), id=f"values-{chart.name}"
    )
    return tag(
        "figure",
        tag("figcaption", tag("h3", chart.title)),
        values,
        class_="chart large" if chart.is_large else "chart",
        data_chart=chart.name,
    )


def _table(chart: Chart) -> Html:
    """A table of some points of each curve: the first, the last, and extremes between them."""
    few = [extremes(series.curve.drawn, _TABLE) for series in chart.series]
    columns = [
        dict(zip(points.steps.tolist(), points.values.tolist(), strict=True)) for points in few
    ]
    rows: list[list[Child]] = [
        [
            f"{step:,.0f}",
            *(format(column[step], chart.form) if step in column else "" for column in columns),
        ]
        for step in sorted({step for column in columns for step in column})
    ]
    head = ["Step", *(series.name for series in chart.series)]
    return table(head, rows, caption=f"{chart.title}; all reports are in metrics.jsonl", numbers=1)
