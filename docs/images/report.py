"""Draws report-light.png and report-dark.png: the top of the report of a run of the digits.

    trainyard report runs/digits --out build/report.html
    python docs/images/report.py build/report.html

With photographs it draws page.jpg: an exported page that has classified them.

    python docs/images/report.py build/page.html cat.jpg coffee.jpg rocket.jpg

Chromium takes the pictures, by playwright, as in tests/docs.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
SIZE = {"width": 1280, "height": 960}


def main(page: str, *photographs: str) -> None:
    with sync_playwright() as playwright:
        found = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for scheme in ("light",) if photographs else ("light", "dark"):
            tab = browser.new_context(color_scheme=scheme, viewport=SIZE).new_page()
            tab.goto(Path(page).resolve().as_uri())
            if photographs:
                tab.set_input_files("#files", photographs)
                tab.wait_for_selector("article:last-child table")
                tab.screenshot(path=HERE / "page.jpg", quality=85)
            else:
                tab.wait_for_selector("svg")
                tab.screenshot(path=HERE / f"report-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
