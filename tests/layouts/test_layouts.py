"""Public data sets by their layouts: docs/data-sets.md is what their copies come to."""

from pathlib import Path

from tests.layouts.trial import PAGE, all_rows, page


def test_the_page_is_what_the_copies_come_to(tmp_path: Path) -> None:
    """If it differs, look at each row that is worse, then run python -m tests.layouts."""
    assert (
        page([row[:3] for row in all_rows(tmp_path)]).splitlines() == PAGE.read_text().splitlines()
    )
