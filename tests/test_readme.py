"""The README: its figures stand in their sources."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def missing(cell: str, source: str) -> list[str]:
    """The figures of a cell of the table that do not stand in a file of results."""
    text = (ROOT / "benchmarks" / "results" / source.strip(" `")).read_text()
    figures = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", cell)
    return [f for f in figures if not re.search(rf"(?<![\d.,]){re.escape(f)}(?!\d|,\d)", text)]


def test_every_result_stands_in_its_source() -> None:
    table = README.partition("## Results")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 3
    for about, ours, others, source in rows:
        assert missing(f"{ours} {others}", source) == [], about
