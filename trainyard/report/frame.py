"""The frame of the page: policy, style, script, title, navigation, switches."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainyard.report.groups import groups_of
from trainyard.report.markup import Html, tag
from trainyard.report.runs import Run

THEMES = {"auto": "System", "light": "Light", "dark": "Dark"}


@cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def script() -> str:
    return _file("charts.js") + _file("page.js")


def head(runs: Sequence[Run], *, is_live: bool) -> Html:
    """The head. Its policy blocks everything but this page's own style and script, by hash."""
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(_file('style.css'))}; script-src {_hash(script())}"
    )
    if is_live:
        policy += "; connect-src 'self'"
    again = tag("meta", http_equiv="refresh", content="10")
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{_title(runs)} - Trainyard report"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(_file("style.css"))),
        tag("noscript", again) if is_live else None,
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def as_json(data: Any) -> Html:
    """JSON that cannot close its script element."""
    return Html(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _title(runs: Sequence[Run]) -> str:
    names = [group.name for group in groups_of(runs)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def headline(runs: Sequence[Run], *, is_live: bool) -> Html:
    models = ", ".join(dict.fromkeys(str(run.recipe.get("model.name", "")) for run in runs))
    words = [models, *_state(runs)]
    live = tag("span", "live", id="live", class_="badge", role="status") if is_live else None
    about = tag("p", " · ".join(filter(None, words)), " " if live else None, live)
    return tag("div", tag("h1", _title(runs)), about, id="headline")


def _state(runs: Sequence[Run]) -> list[str]:
    if len(runs) > 1:
        return [f"{len(runs)} runs"]
    run, share = runs[0], runs[0].share_done()
    if not run.steps:
        return ["no reports yet"]
    if share is not None and share >= 1:
        return ["complete"]
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.folder.metrics.stat().st_mtime))
    done = "" if share is None else f"{share:.0%} done, "
    return [f"{done}last report {last}"]


def switch(name: str, title: str, choices: dict[str, str]) -> Html:
    first = next(iter(choices))
    parts: list[Html] = []
    for value, text in choices.items():
        own = f"{name}-{value}"
        is_first = value == first
        parts += [
            tag("input", type="radio", name=name, id=own, value=value, checked=is_first),
            tag("label", text, for_=own),
        ]
    return tag("fieldset", tag("legend", title), tag("span", *parts), class_="segments")


def navigation(sections: Sequence[tuple[str, str]]) -> Html:
    links = (tag("li", tag("a", title, href=f"#{name}")) for name, title in sections)
    return tag("nav", tag("ul", *links), aria_label="Sections")


def section(name: str, title: str, *content: Html | None) -> Html:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *content, id=name, aria_labelledby=f"{name}-title")
