import csv
import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.command_line import SHORT, Capture, run, shown
from tests.errors import check, refused
from tests.report.histories import record_some, train_report, write_run
from trainyard.report.page import page, write_report
from trainyard.report.runs import read_runs
from trainyard.training.label_scores import LabelScores
from trainyard.training.predictions import Predictions
from trainyard.training.recorded import load_recorded, record

HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)>"


class Outline(HTMLParser):
    """What a browser finds in a page: elements, ids, headings, text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside):
            self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def made(*folders: Path) -> str:
    return page(read_runs(list(folders)))


def data_in(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def chart(text: str, name: str) -> Any:
    return next(chart for chart in data_in(text)["charts"] if chart["name"] == name)


def reports(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [report for line in lines if (report := json.loads(line))["kind"] == kind]


def test_the_figures_are_those_of_metrics_jsonl(trained: list[Path]) -> None:
    text = made(trained[0])
    for name, keys in (("loss", ("loss", "ema_loss")), ("top1", ("top1", "ema_top1"))):
        train, val, ema = chart(text, name)["series"]
        for series, kind, key in (
            (train, "train", keys[0]),
            (val, "val", keys[0]),
            (ema, "val", keys[1]),
        ):
            wanted = reports(trained[0], kind)
            assert series["steps"] == [report["step"] for report in wanted]
            assert series["values"] == pytest.approx([report[key] for report in wanted], rel=1e-5)
    best = max(report["top1"] for report in reports(trained[0], "val"))
    assert f"{100 * best:.2f}%" in Outline(text).text


def test_steps_that_were_made_again_count_once(copied: Path) -> None:
    again = reports(copied, "train")[-1] | {"step": 3, "loss": 7.5}
    with open(copied / "metrics.jsonl", "a") as file:
        file.write(json.dumps(again) + "\n")
    train = chart(made(copied), "loss")["series"][0]
    assert train["steps"] == [1, 2, 3]
    assert train["values"][-1] == 7.5


def test_nothing_is_asked_of_a_network(trained: list[Path]) -> None:
    outline = Outline(made(*trained))
    for tag, attributes in outline.elements:
        for key in ("src", "href", "data", "action", "srcset"):
            value = attributes.get(key) or "#"
            assert value.startswith(("#", "data:")), (tag, value)
    policy = next(
        attributes["content"]
        for _, attributes in outline.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src" not in policy


def test_pictures_of_errors_and_of_right_predictions_have_their_paths(trained: list[Path]) -> None:
    text = made(trained[0])
    pictures = [attributes for tag, attributes in Outline(text).elements if tag == "img"]
    assert all((picture["src"] or "").startswith("data:image/") for picture in pictures)
    wrong = [p for p in pictures if re.fullmatch(r"\d, taken for \d", p["alt"] or "")]
    assert len(wrong) > 10  # twelve steps leave many errors
    assert len(pictures) - len(wrong) == 12
    for name in ("errors", "right"):
        section = text.partition(f'<section id="{name}"')[2].partition("</section>")[0]
        tiles = re.findall(r">is </span><b>(\d).*?title=\"(.*?)\"", section)
        paths = section.partition("<pre>")[2].partition("</pre>")[0].split("\n")
        assert [path for _, path in tiles] == paths
        assert all(
            Path(path).parent.name == label and Path(path).is_file() for label, path in tiles
        )


def sections_of(text: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', text)


def test_what_is_looked_at_first_comes_first(trained: list[Path], tmp_path: Path) -> None:
    one = sections_of(made(trained[0]))
    assert one[:4] == ["overview", "confusions", "errors", "right"]
    assert one[-2:] == ["curves", "details"]
    other = write_run(tmp_path / "other", [train_report(1)])
    assert sections_of(made(*trained, other))[:4] == [
        "overview",
        "differences",
        "curves",
        "confusions",
    ]


def test_the_result_tells_on_how_many_images(tmp_path: Path) -> None:
    """And whether it is that of the moving average."""
    report = train_report(20) | {"kind": "val", "top1": 0.5, "ema_top1": 0.75, "evaluated": 4}
    folder = write_run(tmp_path / "run", [report])
    ranks = np.array([1, 1, 1, 2, 0], np.float32)  # the last one could not be read
    scores = Predictions(ranks, *np.zeros((3, 5), np.float32))
    record(folder / "predictions.npz", 20, np.zeros(5, np.int32), scores, weights="ema_")
    text = Outline(made(folder)).text
    assert "75.00% top-1 of the moving average (EMA) on 4 validation images 30.1% to 95.4%" in text
    assert "1 image could not be read" in text


def test_a_remark_is_told_once(tmp_path: Path) -> None:
    """Each run repeated it, at the top of the page."""
    remark = {"kind": "event", "step": 0, "event": "remark", "message": "a short warm-up"}
    alone = remark | {"message": "few images"}
    folders = [write_run(tmp_path / name, [remark]) for name in "abc"]
    folders.append(write_run(tmp_path / "d", [alone]))
    text = Outline(made(*folders)).text
    assert text.count("a, b, c: a short warm-up") == text.count("short warm-up") == 1
    assert "d: few images" in text and "Remarks: 2" in text


def test_the_loss_is_that_of_the_best_evaluation(tmp_path: Path) -> None:
    """The lowest one was that of a linear probe at step 0."""
    figures = ((0, 0.5, 0.25), (9, 0.75, 0.5))
    folders = [
        write_run(
            tmp_path / name,
            [
                train_report(step + 1) | {"kind": "val", "top1": top1, "loss": loss}
                for step, top1, loss in figures
            ],
        )
        for name in "ab"
    ]
    text = Outline(made(*folders)).text
    assert text.count("0.5000") >= 2 and "Loss of the best" in text
    row = text.partition("Images/s ")[2]
    assert row.startswith("a 0 75.00% 0.5000 ")


@pytest.mark.parametrize(("classes", "is_shown"), [(10, False), (11, True)])
def test_top5_is_shown_above_ten_classes(classes: int, is_shown: bool, tmp_path: Path) -> None:
    report = train_report(10) | {"kind": "val", "top1": 0.5, "top5": 0.9}
    folder = write_run(tmp_path / "run", [report])
    record_some(folder, samples=60, classes=classes)
    text = made(folder)
    assert ("Top-5" in data_in(text)["class_columns"]) is is_shown
    assert (chart_names(text).count("top5") == 1) is is_shown
    assert ("top-5" in Outline(text).text) is is_shown


def chart_names(text: str) -> list[str]:
    return [chart["name"] for chart in data_in(text)["charts"]]


def test_the_matrix_has_every_class_or_the_confused_ones(
    trained: list[Path], tmp_path: Path
) -> None:
    recorded = np.load(trained[0] / "predictions.npz")
    text = made(trained[0])
    table = text[text.index('class="matrix"') :].partition("</table>")[0]
    cells = re.findall(r'<span class="(?:hit|miss)[^>]*>(\d+) <small>(\d+)%', table)
    numbers = [int(count) for count, _ in cells]
    assert all(0 < int(share) <= 100 for _, share in cells)
    assert sum(numbers) == len(recorded["labels"])
    assert table.count("<tr>") == 11
    record_some(write_run(tmp_path / "many", [train_report(1)]), samples=9000, classes=1000)
    text = made(tmp_path / "many")
    table = text[text.index('class="matrix many"') :].partition("</table>")[0]
    assert table.count("<tr>") == 17 and "others" in table


def test_names_and_messages_are_text(copied: Path, digits: Path, tmp_path: Path) -> None:
    step = (copied / "checkpoints" / "best").resolve()
    progress = json.loads((step / "progress.json").read_text())
    progress["classes"] = [f"{n}{HOSTILE}" for n in range(10)]
    (step / "progress.json").write_text(json.dumps(progress))
    event = {"kind": "event", "step": 2, "event": HOSTILE, "message": HOSTILE + "\x00\ud800"}
    with open(copied / "metrics.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")
    bad = {"split": "val", "id": 1, "file": HOSTILE, "offset": HOSTILE, "reason": HOSTILE}
    (copied / "quarantine.jsonl").write_text(json.dumps(bad) + "\n")
    (copied / "environment.json").write_text(json.dumps({"host": HOSTILE, "command": [HOSTILE]}))
    recipe = (copied / "recipe.toml").read_text()
    (copied / "recipe.toml").write_text(recipe + f"# {HOSTILE}\n")
    hostile = copied.rename(tmp_path / "<img src=x>")
    text = made(hostile)
    text.encode()
    outline = Outline(text)
    assert outline.count("script") == 2  # the data and the page's own
    assert all(attributes.get("src") != "x" for _, attributes in outline.elements)
    assert HOSTILE in outline.text  # said as it is
    assert data_in(text)["classes"][0][0].endswith(HOSTILE)


def events_of(step: int, count: int) -> list[dict[str, Any]]:
    return [
        {"kind": "event", "step": step, "event": f"{name}", "message": ""} for name in range(count)
    ]


def test_the_latest_events_of_each_run(tmp_path: Path) -> None:
    """Of two runs, the last events of the second were shown, and none of the first."""
    folders = [write_run(tmp_path / name, events_of(7, 250)) for name in "ab"]
    rows = re.findall(r"<tr>(?:(?!</tr>).)*badge.*?</tr>", made(*folders))
    shown = [re.findall(r">(\w+)<", row) for row in rows]
    assert [row[0] for row in shown] == ["a"] * 100 + ["b"] * 100
    assert [row[-1] for row in shown[:100]] == [f"{n}" for n in range(150, 250)]


def test_the_latest_events_are_marked_in_charts(tmp_path: Path) -> None:
    """The first ones were, and the table had the last."""
    marks = data_in(made(write_run(tmp_path / "run", events_of(7, 250))))["marks"]
    assert [mark["text"] for mark in marks] == [f"{n}" for n in range(200, 250)]


def test_confidences_are_those_before_the_temperature(copied: Path) -> None:
    """A threshold of the report was another one in `predict`."""
    best, predicted = copied / "checkpoints" / "best", copied / "predictions.npz"
    recorded = load_recorded(predicted)
    assert recorded is not None
    name = recorded.weights.rstrip("_")
    for fitted, told in (({name: 1.625}, True), ({name: 1.0}, False), ({"ema-0.7": 2.0}, False)):
        (best / "temperature.json").write_text(json.dumps(fitted))
        section = made(copied).partition('id="confidence"')[2].partition("</section>")[0]
        assert ("the temperature of 1.625" in section) is told
        assert "before the temperature" not in section or told


def test_the_value_that_decides_comes_first(tmp_path: Path) -> None:
    """The headline was the best top-1, of another step than the checkpoint `best`."""
    folders = []
    for name, shares in (("a", ((0.7, 0.8), (0.93, 0.6))), ("b", ((0.6, 0.9), (0.9, 0.5)))):
        evaluations = [
            train_report(step) | {"kind": "val", "top1": top1, "balanced_accuracy": balanced}
            for step, (top1, balanced) in zip((20, 50), shares, strict=True)
        ]
        folders.append(write_run(tmp_path / name, evaluations))
        with open(folders[-1] / "recipe.toml", "a") as file:
            file.write('best_by = "balanced_accuracy"\n')
        record_some(folders[-1], samples=9, classes=3, at=20)
    first = "80.00% balanced accuracy top-1 70.00%, at step 20, the checkpoint best"
    assert f"{first} Best top-1 93.00% at step 50" in Outline(made(folders[0])).text
    text = Outline(made(*folders)).text
    assert "Seed Best balanced accuracy Best top-1 Loss of the best" in text
    assert "From b, the run with the highest balanced accuracy: its raw weights at step 20." in text


def test_images_with_lists_of_labels(tmp_path: Path) -> None:
    """Their classes, and errors that name what is missed and what is wrong."""
    folder = write_run(tmp_path / "run", [train_report(1)])
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], np.bool_)
    logits = np.array([[3, 2, -9], [-3, -2, -9], [-3, 1, 9]], np.float32)  # by class
    scores = LabelScores(np.ones(3, np.bool_), logits)
    record(folder / "predictions.npz", 1, labels, scores, weights="")
    text = made(folder)
    assert data_in(text)["class_columns"][2:] == ["Average precision", "F1"]
    rows = {name: shares for name, *shares in data_in(text)["classes"]}
    assert rows["class 0"] == [2, 1, 1] and "Confidence" not in text and rows["class 1"][2] == 0
    outline = Outline(text)
    assert "missed class 1 wrongly class 2" in outline.text
    assert "Confused classes" not in outline.text


def test_the_command_can_be_given_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_report(1)])
    command = ["trainyard", "train", "--run.length", "3 epochs"]
    (folder / "environment.json").write_text(json.dumps({"command": command}))
    assert "train --run.length '3 epochs'" in Outline(made(folder)).text


def test_logins_are_not_told(tmp_path: Path) -> None:
    events = [
        {"kind": "event", "step": 1, "event": "e", "message": "lost https://me:secret@host/data"}
    ]
    folder = write_run(tmp_path / "run", events)
    with open(folder / "recipe.toml", "a") as file:
        file.write('[data]\nval = "https://me:secret@host/val"\n')
    assert "secret" not in made(folder)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    text = made(write_run(tmp_path / "none", []))
    assert data_in(text)["charts"] == []
    (tmp_path / "none" / "metrics.jsonl").unlink()
    made(tmp_path / "none")
    text = made(write_run(tmp_path / "one", [train_report(1)]))
    assert chart(text, "loss")["series"][0]["values"] == [1]


def test_a_run_without_predictions_has_the_rest(copied: Path) -> None:
    (copied / "predictions.npz").unlink()
    text = made(copied)
    assert "Worst errors" not in text
    assert len(chart(text, "loss")["series"]) == 3


def test_without_the_data_there_are_no_pictures(copied: Path, digits: Path) -> None:
    recipe = (copied / "recipe.toml").read_text()
    (copied / "recipe.toml").write_text(recipe.replace(str(digits), "/nowhere/at/all"))
    outline = Outline(made(copied))
    assert outline.count("img") == 0
    assert "/nowhere/at/all" in outline.text


def test_images_that_have_changed_are_not_shown(copied: Path, digits: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(digits, tmp_path / "digits"))
    for path in (changed / "val").rglob("*.png"):
        path.write_bytes(b"no image")
    recipe = (copied / "recipe.toml").read_text()
    (copied / "recipe.toml").write_text(recipe.replace(str(digits), str(changed)))
    outline = Outline(made(copied))
    assert outline.count("img") == 0


def test_other_data_is_not_shown(copied: Path) -> None:
    environment = json.loads((copied / "environment.json").read_text())
    environment["fingerprints"]["val"] = "other"
    (copied / "environment.json").write_text(json.dumps(environment))
    outline = Outline(made(copied))
    assert outline.count("img") == 0


def test_validation_data_without_a_class_is_shown(digits: Path, tmp_path: Path) -> None:
    """The page told that it had changed: training had opened it with the classes of train."""
    shutil.copytree(digits / "val", tmp_path / "val", ignore=shutil.ignore_patterns("0", ".*"))
    places = ("--data.train", digits / "train", "--data.val", tmp_path / "val")
    assert run("train", "debug", *places, "--run", tmp_path / "run", *SHORT, "--json") == 0
    assert Outline(made(tmp_path / "run")).count("img") > 10


@pytest.mark.slow
def test_large_pictures_become_small(copied: Path, digits: Path, tmp_path: Path) -> None:
    """The validation images at 320 by 240 pixels."""
    large = tmp_path / "digits"
    shutil.copytree(digits, large, ignore=shutil.ignore_patterns(".trainyard-index*"))
    for path in (large / "val").rglob("*.png"):
        with Image.open(path) as image:
            image.resize((320, 240)).save(path, compress_level=1)
    recipe = (copied / "recipe.toml").read_text()
    (copied / "recipe.toml").write_text(recipe.replace(str(digits), str(large)))
    environment = json.loads((copied / "environment.json").read_text())
    del environment["fingerprints"]
    (copied / "environment.json").write_text(json.dumps(environment))
    text = made(copied)
    assert "not at hand" not in text, text[text.index("not at hand") :][:300]
    found = set(re.findall(r'src="(data:image/[^"]+)"', text))
    assert found
    for uri in found:
        assert uri.startswith("data:image/webp;base64,")
        assert len(uri) < 20_000


@pytest.mark.slow
def test_long_runs_and_many_classes_stay_small(tmp_path: Path) -> None:
    """100,000 reports, as of three days, and 21,841 classes."""
    long = [
        train_report(n, grad_norm=1 + n % 7 / 9, images_per_s=900.0 + n % 11, data_wait=n % 13 / 50)
        for n in range(1, 100_001)
    ]
    folder = write_run(tmp_path / "long", long)
    record_some(folder, samples=3 * 21_841, classes=21_841)
    start = time.monotonic()
    path = write_report([folder])
    print(f"{path.stat().st_size:,} bytes in {time.monotonic() - start:.1f} s")
    assert path.stat().st_size < 3_000_000
    text = path.read_text()
    assert Outline(text).count("tr") < 1000
    assert len(data_in(text)["classes"]) == 21_841
    series = chart(text, "grad-norm")["series"][0]
    assert len(series["values"]) <= 1000
    assert max(series["values"]) == pytest.approx(1 + 6 / 9, rel=1e-5)


def test_seeds_are_one_curve_and_other_runs_another(trained: list[Path], tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [train_report(n) for n in range(1, 9)])
    text = made(*trained, other)
    curves = chart(text, "loss-train")["series"]
    assert [len(curve["values"]) for curve in curves] == [12, 8]
    assert "band" in curves[0]
    assert "band" not in curves[1]
    losses = [[r["loss"] for r in reports(run, "train")] for run in trained]
    mean = [sum(pair) / 2 for pair in zip(*losses, strict=True)]
    assert curves[0]["values"] == pytest.approx(mean, rel=1e-5)
    outline = Outline(text)
    assert "model.name test_vit test_vit test_vit" not in outline.text
    assert "run.seed 0 1 0" in outline.text


def test_likely_wrong_labels_of_training_images(
    trained: list[Path], digits: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tables" / "suspects.csv"
    options = ("--data", digits / "train", "--out", file.parent)
    assert run("evaluate", trained[0], *options, "--json") == 0
    rows = [line.split(",") for line in file.read_text().splitlines()]
    losses = [float(row[-1]) for row in rows[1:]]
    assert losses == sorted(losses, reverse=True) and losses[-1] > np.log(2)
    assert run("report", trained[0], "--suspects", file, "--out", tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    section = text[text.index('id="suspects"') :].partition("</section>")[0]
    assert section.count("<img") == 48
    assert Path(rows[1][3]).name in section
    for number, place in ((3, "elsewhere.png"), (2, "100000")):  # the file, the sample's number
        moved = tmp_path / f"{number}.csv"
        rows[-1][number] = rows[1][number] = place
        moved.write_text("".join(",".join(row) + "\n" for row in rows))
        assert run("report", trained[0], "--suspects", moved, "--out", tmp_path / "m.html") == 0
        text = (tmp_path / "m.html").read_text()
        section = text[text.index('id="suspects"') :].partition("</section>")[0]
        assert "<img" not in section and "class=note" in section.replace('"', "")
    for content in ("", "path\n3\n", "\0"):
        file.write_text("data,loss\n" + content)
        if content:
            command = ("report", trained[0], "--suspects", file)
            check(refused(*command), "report.suspects-unreadable", path=file)


@pytest.mark.slow
def test_likely_wrong_labels_of_a_part_and_of_merged_data(digits: Path, tmp_path: Path) -> None:
    """Their names in the file are those of no place: the images were not at hand."""
    folder, tables, page_file = (tmp_path / name for name in ("run", "tables", "r.html"))
    place = ("--data.train", digits / "val", "--data.val_share", "0.3", "--run", folder)
    assert run("train", "debug", *place, *SHORT, "--json") == 0
    both = ("--data", digits / "val", "--data", digits / "train")
    for data in ((), both):
        assert run("evaluate", folder, *data, "--out", tables, "--json") == 0
        file = tables / "suspects.csv"
        assert run("report", folder, "--suspects", file, "--out", page_file) == 0
        section = page_file.read_text().partition('id="suspects"')[2].partition("</section>")[0]
        assert section.count("<img") == 48


def test_a_report_replaces_the_one_before(copied: Path) -> None:
    write_report([copied])
    path = write_report([copied])
    assert path == copied / "report.html"
    assert path.read_text().endswith("</html>\n")
    assert not list(copied.glob(".*part"))


def test_suspects_are_decided_on_once(trained: list[Path], tmp_path: Path, capsys: Capture) -> None:
    """Training images of other guesses than their labels; not those that the run's list has."""

    def listed(*options: object) -> tuple[dict[str, Any], list[dict[str, str]], Any]:
        found = json.loads(shown(capsys, "suspects", *options, "--out", tmp_path / "s", "--json"))
        page_text = Path(found["page"]).read_text()
        data = page_text.partition('id="data">')[2].partition("</script>")[0]
        with open(found["csv"], newline="") as file:
            return found, [*csv.DictReader(file)], json.loads(data)

    found, rows, data = listed(trained[0], "--limit", 7)
    assert (found["suspects"], found["images"], len(data["images"])) == (len(rows), 1433, 7)
    assert all("/train/" in row["file"] and row["class"] != row["guess"] for row in rows)
    losses = [float(row["loss"]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    shown_ones = [(image["file"], image["label"], image["guess"]) for image in data["images"]]
    assert shown_ones == [(row["file"], row["class"], row["guess"]) for row in rows[:7]]
    decided = tmp_path / "decided.csv"
    decided.write_text("file,class\n" + "".join(f"{row['file']},0\n" for row in rows[:5]))
    _, rest, data = listed(trained[0], "--data.corrections", decided)
    assert [row["file"] for row in rest] == [row["file"] for row in rows[5:]]
    assert [row[0] for row in data["earlier"]] == [row["file"] for row in rows[:5]]
    found, rows, _ = listed(*trained)  # as folds: the images that validated them
    assert all("/val/" in row["file"] for row in rows)
    assert len({row["file"] for row in rows}) == len(rows)
