"""Charts in the page: picture, legend, and values as a table."""

from collections.abc import Sequence

from trainyard.report.charts import Chart, Series
from trainyard.report.curves import lowest_and_highest
from trainyard.report.draw import drawn
from trainyard.report.frame import switch
from trainyard.report.markup import Child, Html, join, table, tag
from trainyard.report.ticks import value_text

_TABLE = 40  # points per curve in the table below a chart


def curves_section(charts: Sequence[Chart]) -> Html:
    """The charts, below switches that apply to all of them."""
    log = tag("label", tag("input", type="checkbox", name="log"), "Logarithmic loss and norms")
    slider = tag("input", type="range", name="smoothing", min=0, max=100, step=1)
    smoothing = tag("label", "Smoothing ", slider, tag("span", id="smoothing-value"))
    axes = switch("x", "Against", {"steps": "Steps", "epochs": "Epochs", "seconds": "Time"})
    figures = tag("div", *map(_figure, charts, _widths(charts)), class_="charts", id="charts")
    return join(tag("div", axes, smoothing, log, class_="tools"), figures)


def _widths(charts: Sequence[Chart]) -> list[str]:
    """Half width for large charts, a third for others; the last row has no gap."""
    large = sum(chart.is_large for chart in charts)
    small = len(charts) - large
    halves = min((0, 4, 2)[small % 3], small)
    return ["half"] * large + ["third"] * (small - halves) + ["half"] * halves


def _figure(chart: Chart, width: str) -> Html:
    about = tag("span", f", {chart.about}", class_="detail") if chart.about else None
    legend = tag("ul", *(_key(chart, series) for series in chart.series), class_="legend")
    return tag(
        "figure",
        tag("figcaption", tag("h3", chart.title, about), legend),
        tag("div", drawn(chart), class_="plot"),
        tag("p", class_="readout", aria_live="polite"),
        tag(
            "details",
            tag("summary", "As a table", tag("span", f": {chart.title}", class_="hidden")),
            _figures(chart),
            id=f"figures-{chart.name}",
        ),
        class_=f"chart {width}",
        data_chart=chart.name,
    )


def _key(chart: Chart, series: Series) -> Html:
    last = value_text(chart.kind, float(series.curve.drawn.values[-1]))
    kind = f"key c{series.colour}{' dashed' if series.is_dashed else ''}"
    swatch = tag("span", class_="swatch")
    return tag("li", swatch, f"{series.name} ", tag("span", last, class_="value"), class_=kind)


def _figures(chart: Chart) -> Html:
    """A table of some points of each curve: the first, the last, and extremes between them."""
    columns = []
    for series in chart.series:
        points = lowest_and_highest(series.curve.drawn, _TABLE)
        columns.append(dict(zip(points.steps.tolist(), points.values.tolist(), strict=True)))
    rows: list[list[Child]] = []
    for step in sorted({step for column in columns for step in column}):
        values = (column.get(step) for column in columns)
        cells = ["" if value is None else value_text(chart.kind, value) for value in values]
        rows.append([f"{step:,.0f}", *cells])
    head = ["Step", *(series.name for series in chart.series)]
    return table(head, rows, caption=f"{chart.title}; all reports are in metrics.jsonl", numbers=1)
