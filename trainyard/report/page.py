"""The page: one HTML file with its style, script, data and pictures."""

import base64
import hashlib
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainyard.errors import InputError
from trainyard.files import write_text
from trainyard.monitor.history import METRICS
from trainyard.report.charts import chart_data, charts_of, curves_section
from trainyard.report.details import differences_section, folded_section
from trainyard.report.markup import Html, about, as_json, join, switch, tag
from trainyard.report.overview import overview_section
from trainyard.report.pictures import open_album
from trainyard.report.predictions import TABLES, Section, predictions_sections
from trainyard.report.runs import Group, Run, best_recorded, groups_of, read_runs
from trainyard.report.suspects import suspects_section
from trainyard.training.weight_names import label_of

NAME = "report.html"
_THEMES = {"auto": "System", "light": "Light", "dark": "Dark"}


def write_report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    suspects: Path | None = None,
    cam: bool = False,
) -> Path:
    """Write a report to `out`; by default into a run's directory, or here for several runs.

    `suspects`: suspects.csv of `evaluate --out`, shown too. `cam`: True for class activation maps
    beside the worst errors. InputError for a folder that is no run directory, a file of another
    kind, one that cannot be written, or a model without maps; CheckpointError for one that cannot
    be loaded.
    """
    path = out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    runs = read_runs(list(folders))
    further = [] if suspects is None else [suspects_section(suspects, runs[0])]
    text = page(runs, further, cam=cam)
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError("file.unwritable", path=path, reason=error.strerror) from None
    return path


def page(runs: Sequence[Run], further: Sequence[Section] = (), *, cam: bool = False) -> str:
    """The page of one or several runs, with further sections; for `cam` see `write_report`."""
    groups = groups_of(runs)
    charts = charts_of(groups)
    mistakes, classes = _mistakes(runs, cam=cam)
    predictions = sorted([*mistakes, *further], key=lambda section: section[0] in TABLES)
    curves = [("curves", "Curves", curves_section(charts))] if charts else []
    parts = [*predictions, *curves]
    if len(runs) > 1:
        parts = [("differences", "What differs", differences_section(runs)), *curves, *predictions]
    shown: list[Section] = [
        ("overview", "Result", overview_section(groups)),
        *parts,
        ("details", "Settings, remarks, events, versions", folded_section(groups)),
    ]
    made = f"Made by Trainyard at {time.strftime('%Y-%m-%d %H:%M:%S %Z')}."
    data = as_json(chart_data(charts, groups) | classes)
    theme = switch("theme", "Colours", _THEMES)
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#main", class_="skip"),
        tag("header", _headline(runs, groups), theme, class_="top"),
        _navigation(shown),
        tag("main", *(_section(*section) for section in shown), id="main"),
        tag("footer", tag("p", made), class_="bottom"),
        tag("script", data, type="application/json", id="data"),
        tag("script", Html(_script())),
    )
    return f"<!doctype html>\n{tag('html', _head(groups), body, lang='en')}\n"


def _mistakes(runs: Sequence[Run], *, cam: bool) -> tuple[list[Section], dict[str, Any]]:
    """Sections and data on the best run among those with predictions."""
    best = best_recorded(runs)
    if best is None:
        return [], {}
    run, recorded, key = best
    album = open_album(run)
    if cam and album.index is not None:
        from trainyard.classifier import load  # torch, which the rest of a report does without

        album.overlay = load(run.folder.path).overlay
    sections, data = predictions_sections(run, recorded, album)
    if len(runs) > 1:
        which = about(
            f"From {run.name}, the run with the highest {METRICS[key]}: its "
            f"{label_of(recorded.weights)} weights at step {recorded.step:,}."
        )
        sections = [(name, title, join(which, content)) for name, title, content in sections]
    return sections, data


# --- the frame ---


@cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _script() -> str:
    return _file("charts.js") + _file("page.js")


def _head(groups: Sequence[Group]) -> Html:
    """The head. Its policy blocks everything but this page's own style and script, by hash."""
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(_file('style.css'))}; script-src {_hash(_script())}"
    )
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{title_of(groups)} - Trainyard report"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(_file("style.css"))),
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def title_of(groups: Sequence[Group]) -> str:
    """The names of the first groups."""
    more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    return f"{', '.join(group.name for group in groups[:3])}{more}"


def _headline(runs: Sequence[Run], groups: Sequence[Group]) -> Html:
    models = ", ".join(dict.fromkeys(str(run.recipe.get("model.name", "")) for run in runs))
    state = _state(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"
    line = tag("p", " · ".join(filter(None, (models, state))))
    return tag("div", tag("h1", title_of(groups)), line, id="headline")


def _state(run: Run) -> str:
    share = run.share_done()
    if not run.steps:
        return "no reports yet"
    if run.ended_early:
        return "complete, ended early"
    if share is not None and share >= 1:
        return "complete"
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.folder.metrics.stat().st_mtime))
    done = "" if share is None else f"{share:.0%} done, "
    return f"{done}last report {last}"


def _navigation(sections: Sequence[Section]) -> Html:
    links = (tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in sections)
    return tag("nav", tag("ul", *links), aria_label="Sections")


def _section(name: str, title: str, content: Html) -> Html:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, content, id=name, aria_labelledby=f"{name}-title")
