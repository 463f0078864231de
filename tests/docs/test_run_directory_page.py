"""docs/run-directory.md has every file that a run leaves, and every field of its reports."""

import json
import re
from pathlib import Path

from tests.docs.pages import DOCS

PAGE = (DOCS / "run-directory.md").read_text()


def named(title: str) -> set[str]:
    """What stands in code in the first column of the tables below a title."""
    section = re.split(r"^## ", PAGE.partition(f"{title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    return {code.strip("/") for cell in cells for code in re.findall(r"`([^`]+)`", cell)}


def test_every_file_of_a_run_is_named(finished: Path) -> None:
    files = named("# The run directory")
    for path in finished.iterdir():
        assert path.name.startswith(".") or path.name in {f.split("/")[0] for f in files}, path
    links = {
        f"checkpoints/{p.name}" for p in (finished / "checkpoints").iterdir() if p.is_symlink()
    }
    assert links <= files


def test_every_file_of_a_checkpoint_is_named(finished: Path) -> None:
    files = {name.split("/")[0] for name in named("## A checkpoint")}
    assert {path.name for path in (finished / "checkpoints" / "latest").iterdir()} <= files


def test_every_field_of_a_report_is_named(finished: Path) -> None:
    fields = named("## metrics.jsonl")
    for line in (finished / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line).keys() <= fields
