"""A console that may be given names from users' files."""

from typing import Any

from rich.console import Console
from rich.text import Text

from trainyard.printable import printable


class EscapingConsole(Console):
    """A console that shows control characters in texts and cells of tables as escapes.

    Colours and movements of the cursor that rich itself makes are not concerned.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)
