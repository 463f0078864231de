"""Tables of others' flags beside ours: ours exist and accept the given values."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import (
    DOCS,
    check_mention,
    name_of,
    options_of_training,
    rows_beside_ours,
)
from trainyard.config import all_keys, check

PAGES = sorted((DOCS / "come-from").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_we_have_beside_it_exists(page: Path) -> None:
    rows = list(rows_beside_ours(page))
    assert len(rows) > 15
    for theirs, ours in rows:
        check_ours(theirs, ours)


def check_ours(theirs: str, ours: str) -> None:
    tree: dict[str, dict[str, object]] = {}
    for code in re.findall(r"`([^`]+)`", ours):
        if code.startswith("trainyard "):
            check_mention(code)
        elif code.startswith("--"):
            assert code.split()[0] in options_of_training(), f"{theirs}: {code}"
        else:
            key, _, value = code.partition(" = ")
            assert key in all_keys(), f"{theirs}: {key}"
            section, name = key.split(".")
            if value:
                tree.setdefault(section, {})[name] = tomllib.loads(f"value = {value}")["value"]
    check(tree)


def test_a_wrong_key_option_or_value_is_seen() -> None:
    for wrong in ("`optim.rate`", "`--machines`", "`trainyard tain`"):
        with pytest.raises(AssertionError):
            check_ours("theirs", wrong)
    with pytest.raises(Exception, match=r"optim\.name"):
        check_ours("theirs", '`optim.name = "adamax"`')


def test_there_is_a_page_for_each() -> None:
    assert {page.stem for page in PAGES} == {
        *("convnext-cluster", "webdataset", "decentralized", "large-batch-vit"),
        *("timm", "torchvision"),
    }
