"""Figures on pages of the documentation are those of benchmarks/results."""

import re

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.test_readme import missing

RESULTS = ROOT / "benchmarks" / "results"
# In prose whole numbers without a comma are counts and sizes, not results.
_RESULT = r"\d[\d,]*\.\d+|\d{1,3}(?:,\d{3})+"
_NO_FIGURE = re.compile(r"`[^`]*`|\]\(\S*\)")


@pytest.mark.parametrize(
    ("page", "least"),
    [("compare", 100), ("averaging", 25), ("fine-tuning", 5), ("estimate", 8), ("any-loop", 20)],
)
def test_every_figure_stands_in_its_source(page: str, least: int) -> None:
    """In sentences, of a source that their paragraph names, and in tables, of the last one before.

    Cells are read with words or without.
    """
    checked, sources = 0, list[str]()
    for part in (DOCS / f"{page}.md").read_text().split("\n\n"):
        is_table = part.startswith("| ")
        if not is_table:
            sources = re.findall(r"`(?:benchmarks/results/)?(20\S+\.md)`", part)
        for line in _NO_FIGURE.sub("", part).splitlines() if sources else ():
            for figures in line.split("|")[2:] if is_table else re.findall(_RESULT, line):
                assert any(missing(figures, source) == [] for source in sources), line
                checked += bool(re.search(r"\d", figures))
    assert checked > least


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
    pictures = [p for p in (DOCS / "images").iterdir() if p.suffix in (".png", ".jpg", ".svg")]
    assert pictures
    for picture in pictures:
        assert f"images/{picture.name}" in text
        assert picture.name in programs
