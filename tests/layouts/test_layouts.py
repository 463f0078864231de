"""Public data sets by their layouts: docs/data-sets.md is what their copies come to."""

from pathlib import Path

from tests.layouts.trial import PAGE, SILENT, all_rows, page


def test_the_page_is_what_the_copies_come_to(tmp_path: Path) -> None:
    """If it differs, look at each row that is worse, then run python -m tests.layouts."""
    rows = [(layout, verdict, words) for layout, verdict, words, _ in all_rows(tmp_path)]
    assert [layout.name for layout, verdict, _ in rows if verdict == SILENT] == []
    assert page(rows).splitlines() == PAGE.read_text().splitlines()
