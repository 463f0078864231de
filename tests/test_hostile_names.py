"""Names that would command a terminal, or are no UTF-8, as commands print them."""

import os
import shutil
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, run
from tests.data.tars import write_files
from trainyard.printable import printable

HIDES = "\x1b[2J\x1b[31mred\rgreen\u202e"
SHOWN = r"\x1b[2J\x1b[31mred\rgreen\u202e"
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
        "data show {data} --sheet {new}.png --class {name}",
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


@pytest.mark.parametrize(
    "text", ["", "n01440764", "crème brûlée", "日本\u3000語", "two\nlines", "🐈"]
)
def test_what_is_no_command_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("words", ["report {run}", "export {run} --hub {new}"])
def test_what_is_written_may_have_them(words: str, trained: Path, tmp_path: Path) -> None:
    places = {"run": trained, "new": tmp_path / "new"}
    assert run(*(word.format_map(places) for word in words.split())) == 0
