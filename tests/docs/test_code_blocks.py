"""Commands in the documentation are valid, its programs run, its recipes load."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import (
    DOCS,
    PAGES,
    ROOT,
    blocks,
    check_command,
    check_mention,
    commands,
    mentions,
    name_of,
)
from trainyard.config import load_recipe
from trainyard.errors import InputError

pytestmark = pytest.mark.slow

FIRST_RUN = DOCS / "first-run.md"
QUICK = ("--run.length", "2 steps", "--run.log_every", "1 steps", "--data.threads", "1")
# By tests/test_library.py and tests/docs/test_twelve_minutes.py.
TESTED_ELSEWHERE = {DOCS / "library.md", DOCS / "twelve-minutes.md"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_can_be_given(page: Path) -> None:
    for command in commands(page):
        try:
            check_command(command)
        except (InputError, AssertionError) as error:
            pytest.fail(f"{command}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_is_mentioned_exists(page: Path) -> None:
    for command in mentions(page):
        check_mention(command)


def test_commands_are_found_and_wrong_ones_are_not_taken() -> None:
    assert len(commands(ROOT / "README.md")) > 10
    assert "trainyard launch local digits --ranks 2" in commands(FIRST_RUN)
    for wrong in ("trainyard trian digits", "trainyard train digits --optim.learn 1"):
        with pytest.raises((InputError, AssertionError)):
            check_command(wrong)
    for wrong in ("trainyard data mend x", "trainyard evaluate runs/x --sharper"):
        with pytest.raises(AssertionError):
            check_mention(wrong)


def test_every_recipe_is_one(tmp_path: Path) -> None:
    recipes = [block.text for page in PAGES for block in blocks(page) if block.language == "toml"]
    assert recipes
    for text in recipes:
        (tmp_path / "recipe.toml").write_text(text)
        load_recipe(str(tmp_path / "recipe.toml"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.is_relative_to(DOCS)], ids=name_of)
def test_every_program_runs(page: Path, tmp_path: Path) -> None:
    found = [b.text for b in blocks(page) if b.language == "python" and b.is_run]
    if not found or page in TESTED_ELSEWHERE:
        return
    done = run_python(["-W", "error", "-c", "\n".join(found)], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_first_run_is_as_its_page_says(tmp_path: Path) -> None:
    lines = [
        line
        for block in blocks(FIRST_RUN)
        if block.language == "bash" and block.is_run
        for line in block.text.splitlines()
    ]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line)[1:]
        words += QUICK if words[0] in ("train", "launch") else ()
        done = run_python(["-m", "trainyard", *words], tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"
    assert (tmp_path / "runs" / "digits" / "recipe.toml").is_file()
    assert (tmp_path / "digits.html").is_file()


def run_python(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
