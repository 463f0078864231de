"""Tries all layouts and writes docs/data-sets.md.

python -m tests.layouts [PART OF A NAME OR VERDICT]: with a part, prints the texts of these alone.
"""

import sys
import tempfile
from pathlib import Path

from tests.layouts.trial import PAGE, all_rows, page

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rows = [*all_rows(Path(folder))]
    if part := " ".join(sys.argv[1:]):
        for layout, found, words, text in rows:
            if part in layout.name or part in found:
                print(f"{layout.name}: {found}: {words}\n    {text.replace(folder, '')}")
    else:
        PAGE.write_text(page([row[:3] for row in rows]))
