"""The page: one HTML file with its style, script, data and pictures."""

import time
from collections.abc import Sequence
from typing import Any

from trainyard.report.cards import cards, comparison
from trainyard.report.charts import as_data, charts_of
from trainyard.report.classes import classes_section
from trainyard.report.facts import (
    differences_section,
    environment_section,
    events_section,
    quarantine_section,
    recipe_section,
)
from trainyard.report.figures import curves_section
from trainyard.report.frame import (
    THEMES,
    as_json,
    head,
    headline,
    navigation,
    script,
    section,
    switch,
)
from trainyard.report.groups import groups_of
from trainyard.report.markup import Html, join, tag
from trainyard.report.mistakes import confusions_section, errors_section
from trainyard.report.pictures import Gallery
from trainyard.report.runs import Run

_Sections = list[tuple[str, str, Html | None]]  # id, title and content of each


def page(runs: Sequence[Run], gallery: Gallery, *, is_live: bool = False) -> str:
    """The page of one or several runs. `is_live`: a server keeps it up to date."""
    groups = groups_of(runs)
    charts = charts_of(groups)
    best = _best(runs)
    classes = classes_section(best)
    data = as_data(charts, groups) | {"classes": classes.data if classes else []}
    of_run = f" of {best.name}" if len(runs) > 1 else ""
    sections: _Sections = [
        *([("differences", "What differs", differences_section(runs))] if of_run else []),
        *(_mistakes(best, of_run, gallery, classes.content) if classes else []),
        ("events", "Events", events_section(runs)),
        ("quarantine", "Unreadable images", quarantine_section(runs)),
        ("environment", "Hardware and versions", environment_section(runs)),
        ("recipe", "Recipe", recipe_section(groups)),
    ]
    if charts:
        sections = [("curves", "Curves", curves_section(charts)), *sections]
    notes = (tag("p", note, class_="note") for run in runs for note in run.notes)
    figures = cards(runs[0]) if len(runs) == 1 else comparison(groups)
    sections = [("overview", "Overview", join(figures, *notes)), *sections]
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#main", class_="skip"),
        tag(
            "header",
            headline(runs, is_live=is_live),
            switch("theme", "Colours", THEMES),
            class_="top",
        ),
        navigation([(name, title.removesuffix(of_run)) for name, title, _ in sections]),
        *_rest(sections, data),
    )
    whole = tag("html", head(runs, is_live=is_live), body, lang="en")
    return f"<!doctype html>\n{whole}\n"


def _rest(sections: _Sections, data: Any) -> list[Html]:
    made = f"Made by Trainyard at {time.strftime('%Y-%m-%d %H:%M:%S %Z')}."
    return [
        tag("main", *(section(*each) for each in sections), id="main"),
        tag("footer", tag("p", made), class_="bottom"),
        tag("script", as_json(data), type="application/json", id="data"),
        tag("script", Html(script())),
    ]


def _best(runs: Sequence[Run]) -> Run:
    """The run whose mistakes are shown: the highest top-1 among those with predictions."""
    with_predictions = [run for run in runs if run.recorded is not None] or list(runs)
    return max(with_predictions, key=lambda run: (run.best("top1") or {}).get("top1", 0.0))


def _mistakes(run: Run, of_run: str, gallery: Gallery, classes: Html) -> _Sections:
    album, recorded = gallery.album(run), run.recorded
    assert recorded is not None
    which = "moving average" if recorded.weights else "model"
    about = (
        f"What the {which} says of each image at step {recorded.step:,}, where it is at its best."
    )
    source = tag("p", about, class_="about")
    confused, errors = confusions_section(run, album), errors_section(run, album)
    note = tag("p", album.why_none, class_="note") if album.why_none else None
    return [
        ("classes", f"Classes{of_run}", join(source, classes)),
        ("confusions", f"Confused classes{of_run}", join(note, confused)),
        ("errors", f"Worst errors{of_run}", errors),
    ]
