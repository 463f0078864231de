"""The pages of the reference that are committed are those of the code, and no link is dead."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, name_of

_LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(<?([^)\s>#:]*)(?:#([^)\s]+))?\)")
OTHERS = [*ROOT.glob("*.md"), *(DOCS / "reference").glob("*.md"), ROOT / "benchmarks" / "LOG.md"]
OTHERS += [*(ROOT / "notebooks").glob("*.md"), *(ROOT / "tests").rglob("README.md")]


def without_usage(text: str) -> str:
    """A page without its usages, which Python's releases wrap in different ways."""
    return re.sub(r"^```text\n.*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_committed_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `python docs/_reference.py` writes them."""
    monkeypatch.setenv("COLUMNS", "80")  # which the pages set
    made: Callable[[], dict[str, str]]
    made = runpy.run_path(str(DOCS / "_reference.py"))["committed_pages"]
    committed = {path.name: path.read_text() for path in (DOCS / "reference").iterdir()}
    pages = made()
    assert committed.keys() == pages.keys() and len(pages) > 4
    for name, text in pages.items():
        assert without_usage(committed[name]) == without_usage(text), name


def titles(page: Path) -> set[str]:
    """The anchors of a page, as code hosts make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+?)(?: \{ #\S+ \})?$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", sorted({*PAGES, *OTHERS}), ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for path, anchor in _LINK.findall(text):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in titles(target), f"{path}#{anchor}"


def test_links_are_seen() -> None:
    text = "[a](b.md) [c](d/e.md#f-g) [h](https://i) [j](#k)"
    assert _LINK.findall(text) == [("b.md", ""), ("d/e.md", "f-g"), ("", "k")]
