"""HTML from parts; all text that is not markup is escaped."""

import json
import re
from html import escape
from typing import Any


class Html(str):
    """Text that is markup already, and is not escaped again."""


Child = str | int | float | None
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_EMPTY = frozenset(("img", "input", "link", "meta"))  # in HTML; SVG closes all of its elements


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. Attributes are named as in HTML, with `class_` for class and _ for -.

    True gives a bare attribute; None and False leave it out. Invisible characters are replaced.
    """
    opening = "".join([f"<{name}", *(_attribute(key, of) for key, of in attributes.items()), ">"])
    return Html(opening if name in _EMPTY else f"{opening}{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """The children, concatenated; None is left out."""
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(_visible(str(child)))
            for child in children
            if child is not None
        )
    )


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(_visible(str(value)))}"'


def _visible(text: str) -> str:
    """The text with control characters and lone surrogates, which UTF-8 lacks, replaced."""
    return _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", text)


def as_json(data: Any) -> Html:
    """JSON that cannot close its script element."""
    return Html(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def about(text: str) -> Html:
    """A paragraph that introduces a section."""
    return tag("p", text, class_="about")


def switch(name: str, title: str, choices: dict[str, str]) -> Html:
    """Radio buttons with texts by value; the first one is checked."""
    parts: list[Html] = []
    for value, text in choices.items():
        identity, is_first = f"{name}-{value}", not parts
        parts += [
            tag("input", type="radio", name=name, id=identity, value=value, checked=is_first),
            tag("label", text, for_=identity),
        ]
    return tag("fieldset", tag("legend", title), tag("span", *parts), class_="segments")


def table(
    head: list[str],
    rows: list[list[Child]],
    *,
    caption: str,
    numbers: int = 0,
    class_: str | None = None,
) -> Html:
    """A table in a box that scrolls sideways.

    `numbers` is the first column of numbers, 0 for none. The first cell of a row is its heading.
    """
    columns = ["number" if numbers and column >= numbers else None for column in range(len(head))]
    heads = [
        tag("th", name, scope="col", class_=kind) if name else tag("td")
        for name, kind in zip(head, columns, strict=True)
    ]
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(
                tag("td", child, class_=kind)
                for child, kind in zip(row[1:], columns[1:], strict=True)
            ),
        )
        for row in rows
    ]
    parts = tag("caption", caption), tag("thead", tag("tr", *heads)), tag("tbody", *body)
    full_table = tag("table", *parts, class_=class_)
    return tag("div", full_table, class_="scroll", tabindex=0, role="region", aria_label=caption)
