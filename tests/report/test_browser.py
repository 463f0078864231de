"""The page in a real browser."""

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import browser
from tests.command_line import run
from tests.report.conftest import STEPS
from tests.report.histories import record_some, train_report, write_run
from tests.tiers import tiered
from trainyard.data.index.corrections import read_corrections
from trainyard.report.page import write_report

pytestmark = pytest.mark.slow

NARROW = {"width": 360, "height": 740}
HOSTILE = "<script>document.title='hacked'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.chromium() as started:
        yield started


class Tab:
    """An open page, with the addresses that it requested and its console messages."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.fixture(scope="module")
def reports(trained: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of reports: of one run, of two seeds and another run, and of many classes."""
    folder = tmp_path_factory.mktemp("reports")
    other = write_run(folder / "other", [train_report(n) for n in range(1, 9)])
    many = write_run(folder / "many", [train_report(n, lr=1e-3 * n) for n in range(1, 2001)])
    event = {"kind": "event", "step": 9, "event": HOSTILE, "message": HOSTILE, "level": "warning"}
    with open(many / "metrics.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")
    record_some(many, samples=3000, classes=1000)
    made = {
        "one": write_report(trained[:1], folder / "one.html"),
        "several": write_report([*trained, other], folder / "several.html"),
        "many": write_report([many], folder / "many.html"),
    }
    return {name: path.as_uri() for name, path in made.items()}


@pytest.mark.parametrize("name", ["one", "several", "many"])
def test_a_page_opens_alone_and_without_a_complaint(
    chromium: Any, reports: dict[str, str], name: str
) -> None:
    tab = Tab(chromium, reports[name])
    with tab as page:
        page.wait_for_timeout(200)
        assert tab.complaints == []
        assert [url for url in tab.asked if not url.startswith("data:")] == [reports[name]]
        assert page.title() != "hacked"
        assert page.locator(".plot svg").count() >= 3


FORMS = [*product(("one", "several", "many"), ("light", "dark"), (1280, 360))]


@pytest.mark.parametrize(("name", "scheme", "width"), tiered(FORMS, night=FORMS[1:]))
def test_it_is_accessible(
    chromium: Any, reports: dict[str, str], name: str, scheme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    size = {"width": width, "height": 800}
    with Tab(chromium, reports[name], color_scheme=scheme, viewport=size, bypass_csp=True) as page:
        page.locator("#values-loss, #values-loss-train").first.evaluate("x => x.open = true")
        found = axe.Axe().run(page).response["violations"]
        said = [(v["id"], [n["html"][:150] for n in v["nodes"]][:3]) for v in found]
        assert said == []
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0


def test_each_chart_is_drawn_once(chromium: Any, reports: dict[str, str]) -> None:
    """Each was drawn again by every switch above them."""
    context = chromium.new_context()
    page = context.new_page()
    page.add_init_script(
        "window.drawn = 0; new MutationObserver((all) => all.forEach((one) => drawn +="
        " [...one.addedNodes].filter((node) => node.matches?.('.plot > svg')).length))"
        ".observe(document, { childList: true, subtree: true })"
    )
    page.goto(reports["one"])
    page.wait_for_timeout(200)
    charts = page.locator("figure.chart").count()
    assert charts >= 6
    assert page.locator(".plot > svg").count() == charts
    assert page.evaluate("drawn") == charts
    context.close()


def test_without_a_script_the_values_are_in_tables(chromium: Any, reports: dict[str, str]) -> None:
    with Tab(chromium, reports["one"], java_script_enabled=False) as page:
        assert page.locator("#curves noscript p").is_visible()
        page.locator("figure[data-chart=loss] summary").click()
        cells = page.locator("figure[data-chart=loss] td:visible")
        assert cells.count() == 3 * STEPS  # train, validation and EMA
        assert not page.locator(".tools").is_visible()
        assert page.locator("#classes-table tbody tr:visible").count() == 10
        assert page.locator("#errors-grid img").count() > 10


def test_lines_are_as_wide_as_their_chart(chromium: Any, reports: dict[str, str]) -> None:
    with Tab(chromium, reports["one"]) as page:
        assert page.locator(".plot svg").count() >= 6
        picture = page.locator("figure[data-chart=loss] svg")
        assert picture.bounding_box()["height"] > 200
        assert picture.locator("text.tick").count() > 6
        line = picture.locator("path.line").first
        assert line.bounding_box()["width"] > 0.7 * picture.bounding_box()["width"]
        page.set_viewport_size(NARROW)
        page.wait_for_function("document.querySelector('.plot svg').clientWidth < 340")
        assert line.bounding_box()["width"] > 0.6 * picture.bounding_box()["width"]


def test_details_of_a_run_fit_a_narrow_page(chromium: Any, reports: dict[str, str]) -> None:
    """They were cut at the right."""
    with Tab(chromium, reports["one"], viewport=NARROW) as page:
        page.locator("#details details").evaluate_all("x => x.forEach(y => y.open = true)")
        tables = page.locator(".scroll:has(.facts)")
        assert tables.count() == 2
        for wide in tables.evaluate_all("x => x.map(y => y.scrollWidth - y.clientWidth)"):
            assert wide <= 0


def test_a_path_is_copied(chromium: Any, reports: dict[str, str]) -> None:
    allowed = ["clipboard-read", "clipboard-write"]
    with Tab(chromium, reports["one"], permissions=allowed) as page:
        name = page.locator("#right button.file").first
        name.click()
        page.get_by_role("button", name="path copied").wait_for()
        path = page.evaluate("navigator.clipboard.readText()")
        assert path == name.get_attribute("title") and Path(path).is_file()


def test_the_histogram_of_classes(chromium: Any, reports: dict[str, str]) -> None:
    with Tab(chromium, reports["many"]) as page:
        bars = page.locator("#classes figure rect.bar")
        heights = [bar.bounding_box()["height"] for bar in bars.all()]
        assert len(heights) == 20
        assert max(heights) > 60


def test_values_are_read_off_with_the_pointer(
    chromium: Any, reports: dict[str, str], trained: list[Path]
) -> None:
    with Tab(chromium, reports["one"]) as page:
        figure = page.locator("figure[data-chart=loss]")
        slider = page.locator("input[name=smoothing]")
        slider.fill("0")
        figure.scroll_into_view_if_needed()
        box = figure.locator(".plot").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 100)  # the last step
        lines = (trained[0] / "metrics.jsonl").read_text().splitlines()
        last = {(report := json.loads(line))["kind"]: report for line in lines}
        said = figure.locator(".key").all_text_contents()
        assert said == [
            f"train {last['train']['loss']:.4f}",
            f"validation {last['val']['loss']:.4f}",
            f"EMA {last['val']['ema_loss']:.4f}",
        ]
        assert "step 12 · epoch" in figure.locator(".readout").inner_text()
        other = page.locator("figure[data-chart=lr] .readout")  # all charts show the same place
        assert "step 12" in other.inner_text()
        page.mouse.move(2, 2)
        assert figure.locator(".readout").inner_text() == ""


def test_all_can_be_done_with_the_keyboard(
    chromium: Any, reports: dict[str, str], trained: list[Path]
) -> None:
    with Tab(chromium, reports["one"]) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        reached = set()
        for _ in range(100):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate("document.activeElement.name || document.activeElement.className")
            )
        assert {"theme", "x", "smoothing", "log", "plot"} <= reached
        page.locator("#x-steps").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#x-epochs").is_checked()
        assert page.locator("figure[data-chart=loss] .unit").text_content() == "epochs"
        page.keyboard.press("ArrowRight")
        assert page.locator("figure[data-chart=loss] .unit").text_content() == "seconds"
        page.locator("input[name=smoothing]").focus()
        page.keyboard.press("Home")
        assert page.locator("#smoothing-value").inner_text() == "off"
        plot = page.locator("figure[data-chart=loss] .plot")
        plot.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        lines = (trained[0] / "metrics.jsonl").read_text().splitlines()
        losses = [report["loss"] for report in map(json.loads, lines) if report["kind"] == "train"]
        assert (
            f"train {losses[1]:.4f}"
            in page.locator("figure[data-chart=loss] .readout").text_content()
        )
        key = page.locator("figure[data-chart=loss] .key button").first
        paths = page.locator("figure[data-chart=loss] .plot path")
        before = paths.count()
        key.focus()
        page.keyboard.press("Enter")
        assert key.get_attribute("aria-pressed") == "false"
        assert paths.count() < before


def test_switches(chromium: Any, reports: dict[str, str]) -> None:
    with Tab(chromium, reports["one"], color_scheme="light") as page:
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        page.locator("label[for=theme-dark]").click()
        assert page.evaluate(background) != light
        axis = page.locator("figure[data-chart=loss] text.tick")
        before = axis.all_inner_texts()
        page.locator("input[name=log]").check()
        assert axis.all_inner_texts() != before
        order = [
            float(x)
            for x in page.locator("#errors-grid li").evaluate_all("x => x.map(y => y.dataset.loss)")
        ]
        assert order == sorted(order, reverse=True)
        page.locator("label[for=order-confidence]").click()
        order = [
            float(x)
            for x in page.locator("#errors-grid li").evaluate_all(
                "x => x.map(y => y.dataset.confidence)"
            )
        ]
        assert order == sorted(order, reverse=True)


def test_classes_are_found_and_sorted(chromium: Any, reports: dict[str, str]) -> None:
    with Tab(chromium, reports["many"]) as page:
        rows = page.locator("#classes-table tbody tr")
        assert rows.count() == 60
        page.locator(".more").click()
        assert rows.count() == 260
        page.get_by_label("Find a class").fill("NUMBER 77,")
        assert rows.count() == 1
        assert rows.first.locator("th").inner_text().startswith("class number 77,")
        page.get_by_label("Find a class").fill("")
        page.get_by_role("button", name="Class", exact=True).click()
        assert rows.first.locator("th").inner_text().startswith("class number 0,")
        page.get_by_role("button", name="Class", exact=True).click()
        assert rows.first.locator("th").inner_text().startswith("class number 999,")
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("Class")


def test_wrong_labels_are_decided_on_with_the_keyboard(
    chromium: Any, trained: list[Path], tmp_path: Path
) -> None:
    """What the page saves is what the next run takes."""
    assert run("suspects", trained[0], "--out", tmp_path, "--json") == 0
    page_file = tmp_path / "suspects.html"
    tab = Tab(chromium, page_file.as_uri(), bypass_csp=True)
    with tab as page:
        images = json.loads(page.locator("#data").text_content())["images"][:6]
        other = next(n for n in range(10) if str(n) not in images[4].values())
        downs = ["ArrowDown"] * (other + 1)
        for key in ("g", "r", "x", "s", "c", *downs, "Enter", "ArrowLeft"):
            page.keyboard.press(key)
        assert page.locator("#other").input_value() == str(other)
        assert page.locator("#count").inner_text().startswith("4 of ")
        axe = pytest.importorskip("axe_playwright_python.sync_playwright")
        assert axe.Axe().run(page).response["violations"] == []
        with page.expect_download() as download:
            page.keyboard.press("d")
        download.value.save_as(tmp_path / "corrections.csv")
        assert tab.complaints == []
        assert {url.partition(":")[0] for url in tab.asked} <= {"file", "data", "blob"}
    taken = {one.file: one.name for one in read_corrections(str(tmp_path / "corrections.csv"))}
    choices = [images[0]["guess"], images[1]["label"], "", None, str(other)]
    expected = {image["file"]: of for image, of in zip(images, choices, strict=False)}
    assert taken == {file: name for file, name in expected.items() if name is not None}


@pytest.fixture(scope="module")
def script(chromium: Any, reports: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Calls a function of charts.js."""
    with Tab(chromium, reports["one"]) as page:
        yield lambda name, *given: page.evaluate(f"given => {name}(...given)", list(given))


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 538, [0, 100, 200, 300, 400, 500]),
        (0.1, 0.98, [0.2, 0.4, 0.6, 0.8]),
        (0, 7, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_ticks_are_round(
    script: Callable[..., Any], low: float, high: float, wanted: list[float]
) -> None:
    assert script("ticks", low, high, 5) == pytest.approx(wanted)


def test_logarithmic_ticks(script: Callable[..., Any]) -> None:
    assert script("logTicks", 0.09, 6) == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5])
    decades = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10]
    assert script("logTicks", 1e-6, 10) == pytest.approx(decades)


def test_numbers_are_short(script: Callable[..., Any]) -> None:
    values = {0: "0", 1500: "1,500", 2e4: "20k", 1.5e6: "1.5M", 2e-4: "2e-4", 0.25: "0.25"}
    assert {value: script("short", value) for value in values} == values
    for form in (".4f", ".2%", ",.0f", ".3g"):
        for value in (0.61, 0.98347, 8.3456):
            assert script("formatted", form, value) == format(value, form)


def test_smoothing_is_a_mean_over_a_symmetric_window(script: Callable[..., Any]) -> None:
    random = np.random.default_rng(0)
    steps = np.sort(random.choice(5000, 300, replace=False)).astype(float)
    values = random.standard_normal(300)
    for share in (0.02, 0.2):
        found = script("smoothed", steps.tolist(), values.tolist(), share)
        for n, step in enumerate(steps):
            half = min(share / 2 * (steps[-1] - steps[0]), step - steps[0], steps[-1] - step)
            near = values[np.abs(steps - step) <= half + 1e-9]
            assert found[n] == pytest.approx(near.mean())
    even = [float(n) for n in range(100)]
    assert script("smoothed", even, even, 0.3) == pytest.approx(even)  # also at the ends
    assert script("smoothed", steps.tolist(), values.tolist(), 0) == values.tolist()
