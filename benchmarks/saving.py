"""What a benchmark found, saved: figures as JSON and tables as Markdown."""

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def save(name: str, figures: Mapping[str, Any], text: str, *, folder: Path = RESULTS) -> None:
    """Write FOLDER/DATE-NAME.json and .md; the folder is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{date.today()}-{name}"
    (folder / f"{stem}.json").write_text(json.dumps(figures) + "\n")
    (folder / f"{stem}.md").write_text(text)


def listed(facts: Mapping[str, Any]) -> str:
    """Facts in a line, as a table has them above it."""
    return ", ".join(f"{key} {value}" for key, value in facts.items())
