"""Names that would command a terminal, or are no UTF-8, as commands print them."""

import csv
import os
import shutil
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, run
from tests.data.tars import write_files
from tests.report.histories import train_report, write_run
from trainyard.printable import csv_text, from_csv, printable

HIDES = "\x1b[2J\x1b[31mred\rgreen\u202e\nforged"
SHOWN = r"\x1b[2J\x1b[31mred\rgreen\u202e\nforged"
EMOJI = ":cat: [red]"
LATIN = os.fsdecode(b"caf\xe9")


@pytest.fixture(scope="module")
def hostile(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes; the first has an image that is none, whose name is as bad."""
    folder = tmp_path_factory.mktemp("hostile")
    for split in ("train", "val"):
        for number, name in enumerate((HIDES, EMOJI, LATIN)):
            shutil.copytree(digits / split / str(number), folder / split / name)
        (folder / split / HIDES / f"{HIDES}.png").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def trained(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run("train", "debug", "--data", hostile, "--run", folder, *SHORT) == 0
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "data show {data}",
        "data verify {data} --deep",
        "data index {data}/train",
        "data pack {data} {new} --format webdataset",
        "evaluate {run} --per-class 9 --confusions 9",
        "predict {run} {data}/val",
        "predict {run} {data}/val/{name}/{name}.png",
        "data show {data} --out {new}.png --class {name}",
        "data show {data}/{name}",
        "report {run}",
        "export {run} --hub {new}",
        "train debug --data {data} --run {new} --run.length 2",
    ],
)
def test_no_command_prints_a_name_raw(
    words: str, hostile: Path, trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    places = {"data": hostile, "run": trained, "new": tmp_path / "new", "name": HIDES}
    capsys.readouterr()
    run(*(word.format_map(places) for word in words.split()))
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    assert "\u202e" not in out + err
    assert "\nforged" not in out + err


def test_remarks_print_no_name_raw(tmp_path: Path, capsys: Capture) -> None:
    """On a hidden image that is left out, and on another program's file."""
    write_files(tmp_path / HIDES, ["train/cat/1.jpg", f"train/cat/.{HIDES}.jpg", "dataset.json"])
    assert run("data", "show", f"{tmp_path}/{HIDES}/train") == 0
    said = capsys.readouterr().err
    assert f"cat/.{SHOWN}.jpg" in said and f"{SHOWN}/dataset.json" in said
    assert not set("\x1b\r\u202e") & set(said)


def test_names_are_shown_so_that_they_are_known(hostile: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert run("data", "show", hostile) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (SHOWN, EMOJI, r"caf\udce9"))


@pytest.mark.parametrize("text", ["", "n01440764", "crème brûlée", "日本\u3000語", "🐈"])
def test_what_is_no_command_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("words", ["report {run}", "export {run} --hub {new}"])
def test_what_is_written_may_have_them(words: str, trained: Path, tmp_path: Path) -> None:
    places = {"run": trained, "new": tmp_path / "new"}
    assert run(*(word.format_map(places) for word in words.split())) == 0


@pytest.mark.parametrize(
    "name",
    ["=1+1", "+a", "-a", "-", "@a", "\ta", "\r=a", "\n@a", "\uff1da", "'=a", "-1+a", "+1e5x"],
)
def test_no_name_is_a_formula_in_a_spreadsheet(name: str, tmp_path: Path) -> None:
    assert str(csv_text(name)).startswith("'")
    assert from_csv(str(csv_text(name))) == name
    write_run(tmp_path / "runs" / name, [train_report(1)])
    assert run("runs", tmp_path / "runs", "--out", tmp_path / "runs.csv") == 0
    with open(tmp_path / "runs.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["name"], row["run"]) == (csv_text(name), str(tmp_path / "runs" / name))


@pytest.mark.parametrize(
    "cell", ["-1.5", "+3", "-2e-05", "a=b", "/=a", "'a", "'", "", -1.5, float("-inf"), 3, None]
)
def test_numbers_and_other_texts_stay_as_they_are(cell: object) -> None:
    assert csv_text(cell) is cell
    assert from_csv(f"{cell}") == f"{cell}"
