"""Texts for people: names from users' files, made safe for a terminal, and quantities."""

import json
import re
import sys
import unicodedata
from typing import Any

_DAY_S = 24 * 3600
# Signs at which a formula begins, full-width ones too, and blanks that a spreadsheet passes over.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?")


def printable(text: str, *, keep: str = "") -> str:
    """The text with control characters, and bytes that are no UTF-8, as escapes such as \\x1b.

    Unescaped, they could hide text, move the cursor, forge a line or, on a stream in UTF-8, end the
    program. Those in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(
        each
        if each in keep or each.isprintable() or unicodedata.category(each) == "Zs"
        else each.encode("unicode_escape").decode()
        for each in text
    )


def csv_text(cell: object) -> object:
    """A text in a CSV file with ' before what a spreadsheet would run as a formula.

    Numbers stay, also as texts, and so do paths from the root. `from_csv` takes it away again.
    """
    is_formula = isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if is_formula else cell


def from_csv(text: str) -> str:
    """A text as it was before `csv_text`."""
    return text[1:] if text[:1] == "'" and _FORMULA.match(text) else text


def print_line(text: str) -> None:
    """Print a line on stderr, after the name of the program, with everything escaped that has to
    be."""
    sys.stderr.write(f"trainyard: {printable(text)}\n")


def in_seconds(seconds: float) -> str:
    """3,600 s, 2.35 s, 40.5 ms, 0.25 ms."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def in_bytes(num_bytes: float) -> str:
    """A decimal size: 1.28 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def in_bits(bytes_per_second: float) -> str:
    """11.8 Gb/s, 94 Mb/s."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mb/s"


def as_text(value: Any) -> str:
    """A value as text: strings as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def how_many(count: int, what: str) -> str:
    """1 rank, 1,024 ranks."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def in_millions(count: int) -> str:
    """28.59 M; 7,210 below a million."""
    return f"{count / 1e6:,.4g} M" if count >= 1e6 else f"{count:,}"


def duration(seconds: float | None) -> str:
    """0:01:05, 26:00:00, 3d 4:00; dashes for None."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if seconds < 2 * _DAY_S:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{hours // 24}d {hours % 24}:{minutes:02d}"


def epochs_in_all(epochs: float) -> str:
    """300, 8, 0.89: steps are whole, so the last epoch may exceed the number a little."""
    return f"{round(epochs, 1 if epochs >= 1 else 2):g}"
