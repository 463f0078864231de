"""A browser for pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """A Chromium without a window. The test is skipped where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="pip install playwright axe-playwright-python"
    )
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with playwright.sync_playwright() as driver:
        if path is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip("no browser: apt-get install chromium, or playwright install chromium")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
