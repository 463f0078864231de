"""The charts of the page, and their curves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainyard.monitor.reports import Report
from trainyard.report.curves import Axes, Curve, Floats, Reports, axes_of, curve_of
from trainyard.report.groups import Group
from trainyard.report.runs import Run

Kind = Literal["loss", "percent", "rate", "count", "number", "bytes"]
COLOURS = 7  # colours in the style sheet, distinct for colour-blind readers too
_POINTS = 1000  # per curve
_MOST = 6000  # in one chart, over all runs' curves


@dataclass(frozen=True)
class Series:
    name: str
    group: int
    colour: int
    curve: Curve
    is_noisy: bool = False  # drawn faintly, with its smoothed curve on top
    is_dashed: bool = False
    has_dots: bool = False


@dataclass(frozen=True)
class Chart:
    name: str  # an id
    title: str
    kind: Kind
    series: tuple[Series, ...] = ()
    from_zero: bool = False
    has_log: bool = False  # True if the switch for logarithmic axes applies
    is_large: bool = False
    about: str = ""


@dataclass(frozen=True)
class Role:
    """A key of train or val reports, and its curve."""

    key: str
    kind: Literal["train", "val"]
    name: str


_TRAIN, _VAL, _EMA = "train", "validation", "EMA"
_COLOUR_OF = {_TRAIN: 0, _VAL: 1, _EMA: 2}
_LARGE: tuple[tuple[Chart, tuple[Role, ...]], ...] = (
    (
        Chart("loss", "Loss", "loss", has_log=True, is_large=True),
        (Role("loss", "train", _TRAIN), Role("loss", "val", _VAL), Role("ema_loss", "val", _EMA)),
    ),
    (
        Chart("top1", "Top-1 accuracy", "percent", is_large=True),
        (Role("top1", "train", _TRAIN), Role("top1", "val", _VAL), Role("ema_top1", "val", _EMA)),
    ),
)
_SMALL: tuple[tuple[Chart, tuple[Role, ...]], ...] = (
    (
        Chart("top5", "Top-5 accuracy", "percent"),
        (Role("top5", "val", _VAL), Role("ema_top5", "val", _EMA)),
    ),
    (Chart("lr", "Learning rate", "rate", from_zero=True), (Role("lr", "train", "rate"),)),
    (
        Chart("grad-norm", "Gradient norm", "number", has_log=True),
        (Role("grad_norm", "train", "norm"),),
    ),
    (
        Chart("speed", "Images per second", "count", from_zero=True),
        (Role("images_per_s", "train", "all devices"),),
    ),
    (
        Chart("wait", "Waiting for data", "percent", from_zero=True, about="share of the time"),
        (Role("data_wait", "train", "share"),),
    ),
    (
        Chart("mfu", "Model FLOPs utilisation", "percent", from_zero=True),
        (Role("mfu", "train", "of the peak"),),
    ),
    (
        Chart("use", "Device in use", "percent", from_zero=True),
        (Role("gpu_use", "train", "share"),),
    ),
    (
        Chart("memory", "Memory", "bytes", from_zero=True, about="peak, first rank"),
        (Role("memory", "train", "peak"),),
    ),
    (
        Chart("power", "Power", "number", from_zero=True, about="watts, first device"),
        (Role("gpu_power", "train", "watts"),),
    ),
    (
        Chart("update", "Update to weight ratio", "rate", has_log=True),
        (Role("update_ratio", "train", "ratio"),),
    ),
    (
        Chart("distance", "Distance of replicas from their mean", "rate"),
        (Role("consensus_distance", "val", "distance"),),
    ),
)


def charts_of(groups: Sequence[Group]) -> list[Chart]:
    """Charts with data. For several groups, training and validation get a chart each."""
    found = []
    for chart, roles in (*_LARGE, *_SMALL):
        several = len(groups) > 1
        found += _compared(chart, roles, groups) if several else [_of_one(chart, roles, groups[0])]
    return [chart for chart in found if chart.series]


def _of_one(chart: Chart, roles: Sequence[Role], group: Group) -> Chart:
    series = [_series(role, group, 0, [group]) for role in roles]
    drawn = (
        replace(each, colour=_COLOUR_OF.get(role.name, 0), is_dashed=role.name == _EMA)
        for role, each in zip(roles, series, strict=True)
        if each is not None
    )
    return replace(chart, series=tuple(drawn))


def _compared(chart: Chart, roles: Sequence[Role], groups: Sequence[Group]) -> list[Chart]:
    """A colour for each group; training and validation in separate charts, the EMA dashed."""
    found = []
    kinds = list(dict.fromkeys(role.kind for role in roles))
    for kind in kinds:
        mine = [role for role in roles if role.kind == kind]
        series = [
            replace(each, name=name, is_dashed=number > 0)
            for place in range(len(groups))
            for number, role in enumerate(mine)
            if (each := _series(role, groups[place], place, groups)) is not None
            for name in [f"{groups[place].name}{', EMA' if number else ''}"]
        ]
        apart = len(kinds) > 1
        title = f"{chart.title}, {_TRAIN if kind == 'train' else _VAL}" if apart else chart.title
        name = f"{chart.name}-{kind}" if apart else chart.name
        found.append(replace(chart, name=name, title=title, series=tuple(series)))
    return found


def _series(role: Role, group: Group, place: int, groups: Sequence[Group]) -> Series | None:
    points = max(min(_POINTS, _MOST // len(groups)), 100)
    curve = curve_of(group, _reports(role), role.key, points)
    if curve is None:
        return None
    return Series(
        name=role.name,
        group=place,
        colour=place % COLOURS,
        curve=curve,
        is_noisy=role.kind == "train" and role.key != "lr",
        has_dots=role.kind == "val" and len(curve.drawn.steps) <= 60,
    )


def _reports(role: Role) -> Reports:
    def of(run: Run) -> list[Report]:
        return run.history.train if role.kind == "train" else run.history.val

    return of


# --- data for the script in the page ---


def as_data(charts: Sequence[Chart], groups: Sequence[Group]) -> dict[str, Any]:
    """Plain values for JSON, rounded to visible precision."""
    return {
        "axes": [_axes(axes_of(group)) for group in groups],
        "marks": _marks(groups),
        "charts": [
            {
                "name": chart.name,
                "title": chart.title,
                "kind": chart.kind,
                "zero": chart.from_zero,
                "log": chart.has_log,
                "large": chart.is_large,
                "series": [_plain(series) for series in chart.series],
            }
            for chart in charts
        ],
    }


def _plain(series: Series) -> dict[str, Any]:
    curve = series.curve
    found: dict[str, Any] = {
        "name": series.name,
        "group": series.group,
        "colour": series.colour,
        "noisy": series.is_noisy,
        "dashed": series.is_dashed,
        "dots": series.has_dots,
        "s": _steps(curve.drawn.steps),
        "v": _rounded(curve.drawn.values),
    }
    if curve.means.steps is not curve.drawn.steps:
        found |= {"ms": _steps(curve.means.steps), "mv": _rounded(curve.means.values)}
    if curve.band:
        found |= {"low": _rounded(curve.band[0]), "high": _rounded(curve.band[1])}
    return found


def _axes(axes: Axes) -> dict[str, Any]:
    return {
        "steps": _steps(axes.steps),
        "seconds": _rounded(axes.seconds),
        "epochs": _rounded(axes.epochs),
    }


def _steps(values: Floats) -> list[float]:
    found = (round(value, 1) for value in values.tolist())
    return [int(value) if value == int(value) else value for value in found]


def _rounded(values: Floats) -> list[float]:
    found = (float(f"{value:.6g}") for value in values.tolist())
    return [int(value) if value == int(value) else value for value in found]


def _marks(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Events of a single run, at their steps; none for several runs."""
    if len(groups) > 1 or groups[0].is_several:
        return []
    return [
        {"step": event["step"], "text": str(event.get("event", ""))}
        for event in groups[0].runs[0].history.events
        if event["step"] and event.get("event") != "bounds"
    ][:50]
