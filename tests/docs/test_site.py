"""The documentation as it is built: strictly, complete, and readable without a network."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import trainyard
from tests.browser import chromium
from tests.docs.pages import ROOT
from trainyard.command_line import _parser
from trainyard.config import all_keys, builtin_recipes
from trainyard.errors import TrainyardError

pytestmark = pytest.mark.slow

NARROW = {"width": 390, "height": 800}
AXE = (
    *("first-run", "compare", "learns-nothing", "come-from/timm", "how-it-works/index"),
    *("watching", "reference/recipe-keys"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by mkdocs, which ends with an error if a link or an anchor leads nowhere."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "COLUMNS": "40"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def ids(page: Path) -> set[str]:
    return set(re.findall(r' id="([^"]+)"', page.read_text()))


def test_every_recipe_key_and_recipe_is_in_the_reference(site: Path) -> None:
    assert all_keys().keys() <= ids(site / "reference" / "recipe-keys.html")
    assert builtin_recipes().keys() <= ids(site / "reference" / "recipes.html")


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    page = site / "reference" / "commands.html"
    anchors, text = ids(page), page.read_text()
    paths = [*_parser().paths()]
    assert paths
    for path in paths:
        parser = reduce(lambda above, name: above.commands[name][0], path.split(), _parser())
        assert path.replace(" ", "-") in anchors
        for action in parser._actions:
            if action.option_strings and action.option_strings[0] != "-h":
                assert action.option_strings[0] in text


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = ids(site / "reference" / "python.html")
    names = {anchor.rpartition(".")[2] for anchor in anchors if anchor.startswith("trainyard.")}
    assert set(trainyard.__all__) <= names


def test_every_exit_code_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "exit-codes.html").read_text()
    rows = re.findall(r"<td>(\d+)</td>\s*<td><code>(\w+)", text)
    queue = [TrainyardError]
    for error in queue:
        queue += error.__subclasses__()
    assert {(str(e.exit_code), e.__name__) for e in queue if _is_ours(e)} == set(rows)


def _is_ours(error: type[TrainyardError]) -> bool:
    return error.__module__ == "trainyard.errors"


# --- in a browser, opened from the folder ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def test_pages_ask_for_nothing_from_elsewhere_and_fit(site: Path, browser: Any) -> None:
    tab = browser.new_context(viewport=NARROW).new_page()
    asked: list[str] = []
    wrong: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("requestfailed", lambda request: wrong.append(f"{request.failure} {request.url}"))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 30
    for page in pages:
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], page
    # What the next page cuts short has not failed.
    assert [what for what in wrong if not what.startswith("net::ERR_ABORTED")] == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_search_works_without_a_server(site: Path, browser: Any) -> None:
    tab = browser.new_page()
    tab.goto((site / "come-from" / "timm.html").as_uri())
    tab.keyboard.press("/")
    tab.keyboard.type("layer_decay")
    first = tab.locator(".md-search-result__item a").first
    assert "reference/recipe-keys.html" in first.get_attribute("href", timeout=30_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_can_be_read_by_everyone(site: Path, browser: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    tab = browser.new_context(color_scheme=scheme).new_page()
    for name in AXE:
        tab.goto((site / f"{name}.html").as_uri())
        tab.wait_for_function("document.querySelector('.md-search[aria-label]')")
        found = axe.Axe().run(tab).response["violations"]
        # The theme gives each code block's buttons a landmark of the same name.
        assert [v["id"] for v in found if v["id"] != "landmark-unique"] == [], name


def test_the_drawing_follows_light_and_dark(site: Path, browser: Any) -> None:
    colours = []
    for scheme in ("light", "dark"):
        tab = browser.new_context(color_scheme=scheme).new_page()
        tab.goto((site / "how-it-works" / "index.html").as_uri())
        text = tab.locator(".drawing text").first
        colours.append(text.evaluate("node => getComputedStyle(node).fill"))
    assert colours[0] != colours[1]
