"""Safe texts for a terminal from names in users' files."""

import sys
import unicodedata


def printable(text: str) -> str:
    """The text with control characters, and bytes that are no UTF-8, as escapes such as \\x1b.

    Unescaped, they could hide text, move the cursor or, on a stream in UTF-8, end the program.
    Line breaks stay.
    """
    if text.isprintable():
        return text
    return "".join(letter if _is_shown(letter) else _escape(letter) for letter in text)


def print_line(text: str) -> None:
    """Print a line on stderr, after the name of the program, with everything escaped that has to
    be."""
    sys.stderr.write(printable(f"trainyard: {text}\n"))


def _is_shown(letter: str) -> bool:
    return letter == "\n" or letter.isprintable() or unicodedata.category(letter) == "Zs"


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
