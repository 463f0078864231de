"""docs/architecture.md: its tree and its paths are those of the code."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.test_layers import DATA, LEVELS

PACKAGE = ROOT / "trainyard"
PAGE = (DOCS / "architecture.md").read_text()
TREE = PAGE.split("    trainyard/\n")[1].split("\n\n")[0]


def tree() -> list[Path]:
    """The files and folders of the tree on the page, in its order."""
    found: list[Path] = []
    parents = {4: PACKAGE}
    for line in TREE.splitlines():
        indent = len(line) - len(line.lstrip())
        path = parents[indent - 2] / line.split()[0]
        parents[indent] = path
        found.append(path)
    return found


def test_every_folder_is_in_the_tree_and_every_entry_exists() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    folders |= {path.parent for path in PACKAGE.rglob("*.toml")} - {PACKAGE}
    assert {path for path in tree() if path.is_dir()} == folders
    assert [path for path in tree() if not path.exists()] == []


def test_the_tree_is_in_the_order_of_imports() -> None:
    units = [path.stem for path in tree() if path.parent == PACKAGE]
    levels = [number for unit in units for number, level in enumerate(LEVELS) if unit in level]
    assert levels == sorted(levels, reverse=True)
    assert len(levels) > 15
    rooms = [path.name for path in tree() if path.parent == PACKAGE / "data"]
    assert rooms == [room for room in DATA if room in rooms]


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_in_the_text_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    names = re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*(?:/|\.py|\.toml))`", text)
    assert len(names) > 15
    for name in names:
        found = [*ROOT.glob(name), *(ROOT / "tests").glob(name), *PACKAGE.glob(f"**/{name}")]
        assert found, f"{name} is on the page only"
