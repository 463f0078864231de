"""Public data sets by their layouts: docs/data-sets.md is what their copies come to."""

from pathlib import Path

import pytest

from tests.layouts.copies import Copy, Layout
from tests.layouts.trial import ITSELF, NO_SPLIT, PAGE, SILENT, TOLD, all_rows, page, verdict


def test_the_page_is_what_the_copies_come_to(tmp_path: Path) -> None:
    """If it differs, look at each row that is worse, then run python -m tests.layouts."""
    rows = [(layout, verdict, words) for layout, verdict, words, _ in all_rows(tmp_path)]
    assert [layout.name for layout, verdict, _ in rows if verdict == SILENT] == []
    assert page(rows).splitlines() == PAGE.read_text().splitlines()


@pytest.mark.parametrize(
    ("names", "split", "told", "expected"),
    [
        (["cat"], "train", "", ITSELF),
        (["dog"], "train", "", SILENT),
        (["cat", "dog"], "train", "", SILENT),
        ([], "", "", SILENT),
        (["dog"], "train", "README", TOLD),
        (["cat"], "test", "", SILENT),
        (["cat"], "test", "README", ITSELF + NO_SPLIT),
    ],
)
def test_an_image_of_another_class_or_split_is_noticed(
    names: list[str], split: str, told: str, expected: str, tmp_path: Path
) -> None:
    def build(copy: Copy) -> None:
        first, *_ = copy.images("{c}/{i}.jpg")
        copy.know(first.content, names, split)
        copy.text("README", "is left out, and told")

    found, _, _ = verdict(Layout("set", build, (), "", told, ""), tmp_path / "set")
    assert found == expected


def test_an_image_that_is_in_no_split_is_noticed(tmp_path: Path) -> None:
    def build(copy: Copy) -> None:
        copy.images("train/{c}/{i}.jpg")
        copy.images("val/{c}/{i}.jpg", split="val")
        copy.know(copy.made("other/{i}.jpg")[0].content, ["cat"], "train")

    assert verdict(Layout("set", build, (), "", "", ""), tmp_path / "set")[0] == SILENT
