"""Figures on pages of the documentation are those of benchmarks/results."""

import re
from itertools import pairwise

from tests.docs.pages import DOCS, ROOT
from tests.test_readme import missing

RESULTS = ROOT / "benchmarks" / "results"


def test_every_figure_beside_others_stands_in_its_source() -> None:
    """Sources are named in the paragraph above a table."""
    parts = re.split(r"\n\n", (DOCS / "compare.md").read_text())
    checked = 0
    for above, table in pairwise(parts):
        sources = re.findall(r"`(20\S+\.md)`", above)
        for row in table.splitlines()[2:] if sources and table.startswith("| ") else ():
            for cell in row.strip("|").split("|")[1:]:
                if not re.search("[A-Za-z]", cell):
                    assert any(missing(cell, source) == [] for source in sources), row
                    checked += 1
    assert checked > 80


def test_the_symptoms_are_those_that_were_measured() -> None:
    page = (DOCS / "learns-nothing.md").read_text()
    (source,) = re.findall(r"`benchmarks/results/(.+-symptoms\.md)`", page)
    measured = [line.split(" | ")[:5] for line in (RESULTS / source).read_text().splitlines()]
    faults = [cells for cells in measured if cells[0].startswith("| ") and len(cells) == 5]
    wanted = [" | ".join(cells).rstrip(" |") for cells in faults]
    assert len(wanted) > 12
    for row in wanted:
        assert row in page


def test_every_picture_is_on_a_page_and_drawn_by_a_program() -> None:
    programs = "".join(path.read_text() for path in (DOCS / "images").glob("*.py"))
    text = "".join(path.read_text() for path in [*DOCS.rglob("*.md"), ROOT / "README.md"])
    pictures = [p for p in (DOCS / "images").iterdir() if p.suffix in (".png", ".svg")]
    assert pictures
    for picture in pictures:
        assert f"images/{picture.name}" in text
        assert picture.name in programs
