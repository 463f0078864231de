"""HTML from parts; all text that is not markup is escaped."""

from html import escape


class Html(str):
    """Text that is markup already, and is not escaped again."""


Child = str | int | float | None
_EMPTY = frozenset(("img", "input", "link", "meta"))  # in HTML; SVG closes all of its elements


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. Attributes are named as in HTML, with `class_` for class and _ for -.

    True gives a bare attribute; None and False leave it out. Invisible characters are replaced.
    """
    opening = "".join([f"<{name}", *(_attribute(key, of) for key, of in attributes.items()), ">"])
    return Html(opening if name in _EMPTY else f"{opening}{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """The children, concatenated; None is left out."""
    return Html("".join(_escaped(child) for child in children if child is not None))


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(_visible(str(value)))}"'


def _escaped(child: Child) -> str:
    return child if isinstance(child, Html) else escape(_visible(str(child)))


def _visible(text: str) -> str:
    """The text with control characters and lone surrogates, which UTF-8 lacks, replaced."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if (letter < " " and letter not in "\n\t") or "\x7f" <= letter < "\xa0" or _is_half(letter)
        else letter
        for letter in text
    )


def _is_half(letter: str) -> bool:
    return "\ud800" <= letter <= "\udfff"


def table(
    head: list[str], rows: list[list[Child]], *, caption: str, numbers: int = 0, **attributes: str
) -> Html:
    """A table in a box that scrolls sideways.

    `numbers` is the first column of numbers, 0 for none. The first cell of a row is its heading.
    """

    def cell(name: str, column: int, child: Child, **more: str) -> Html:
        is_number = bool(numbers) and column >= numbers
        return tag(name, child, class_="number" if is_number else None, **more)

    body = [
        tag(
            "tr",
            cell("th", 0, row[0], scope="row"),
            *(cell("td", column, child) for column, child in enumerate(row[1:], start=1)),
        )
        for row in rows
    ]
    columns = [
        cell("th", column, name, scope="col") if name else tag("td")
        for column, name in enumerate(head)
    ]
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *columns)),
        tag("tbody", *body),
        **attributes,
    )
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)
