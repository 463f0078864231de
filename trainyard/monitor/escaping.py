"""A console that is safe for names from users' files."""

from typing import Any

from rich.console import Console
from rich.text import Text

from trainyard.printable import printable


class EscapingConsole(Console):
    """A console that shows control characters in texts and table cells as escapes.

    Colours and cursor movements made by rich itself stay.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)
