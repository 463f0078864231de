"""`bench loader` as a command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
from tests.images import jpeg
from trainyard.cli.bench import advice
from trainyard.data._native import core

BRIEF = ("--seconds", "0.2", "--size", "32", "--batch", "8", "--threads", "1")


@pytest.fixture
def jpegs(tmp_path: Path) -> Path:
    for number in range(20):
        path = tmp_path / "photos" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(64 + number))
    return tmp_path / "photos"


def measured(capsys: Capture, location: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(capsys, "bench", "loader", location, *BRIEF, "--json"))
    return found


def test_every_part_is_measured(jpegs: Path, capsys: Capture) -> None:
    found = measured(capsys, jpegs)
    assert found["samples"] == 20
    assert found["threads"] == 1
    assert found["bytes_per_image"] == sum(p.stat().st_size for p in jpegs.glob("*/*.jpg")) / 20
    assert min(found["reading"], found["loader"], *found["decoding"].values()) > 0
    if core is not None:
        assert found["path"] == core.paths[0]
        assert found["fallback"] == 0
        assert list(found["decoding"]) == ["libraries", "stored", "seek", "packed"]


def test_images_left_to_the_libraries_are_counted(tmp_path: Path, capsys: Capture) -> None:
    for number in range(4):
        path = tmp_path / "train" / "class" / f"{number}.{('jpg', 'bmp')[number % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9)).save(path)
    found = measured(capsys, tmp_path)
    assert found["split"] == "train"
    assert found["fallback"] == (1.0 if core is None else 0.5)


def test_the_table_names_every_way(jpegs: Path, capsys: Capture) -> None:
    table = shown(capsys, "bench", "loader", jpegs, *BRIEF)
    for what in ("reading", "decoding, Pillow", "whole loader", "Advice: "):
        assert what in table


@pytest.mark.skipif(core is None, reason="needs the extension")
def test_a_saved_seek_table_is_noticed_and_packed_data_has_no_use_for_one(
    jpegs: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert run("data", "index", jpegs, "--seek") == 0
    assert measured(capsys, jpegs)["seek_table"]
    assert run("data", "pack", jpegs, tmp_path / "packed", "--format", "packed") == 0
    found = measured(capsys, tmp_path / "packed")
    assert found["format"] == "packed"
    assert list(found["decoding"]) == ["libraries", "stored"]


def test_it_works_without_the_extension(jpegs: Path) -> None:
    code = "import sys; sys.modules['trainyard.data._native.core'] = None\n"
    code += "from trainyard.command_line import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "bench", "loader", str(jpegs), *BRIEF, "--json"]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    found = json.loads(result.stdout)
    assert found["path"] is None
    assert found["fallback"] == 1.0
    assert list(found["decoding"]) == ["libraries"]
    assert "extension" in found["advice"]


@pytest.mark.parametrize("option", ["--batch", "--size", "--channels", "--threads", "--seconds"])
def test_numbers_are_above_zero(option: str, tmp_path: Path) -> None:
    check(refused("bench", "loader", tmp_path, option, "0"), "option.invalid", option=option)


def test_a_missing_location_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    check(refused("bench", "loader", path), "data.not-found", path=path)


# --- the advice ---

FOUND: dict[str, Any] = {
    "location": "photos",
    "channels": 3,
    "path": "avx2",
    "fallback": 0.0,
    "seek_table": False,
    "threads": 4,
    "cores": 4,
    "reading": 100_000.0,
    "bytes_per_image": 100.0,
    "decoding": {"libraries": 500.0, "stored": 1000.0, "seek": 1300.0, "packed": 4000.0},
    "decoding_bytes": {"libraries": 100.0, "stored": 100.0, "seek": 100.0, "packed": 210.0},
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "`trainyard data index photos --seek` (1.3 x), or after `trainyard data pack photos "
         "DESTINATION --format packed` (4.0 x, in 2.1 times the bytes)"),
        ({"seek_table": True}, "--format packed` (3.1 x"),
        ({"reading": 900.0}, "data.stage"),
        ({"threads": 2}, "this machine has 4 cores"),
        ({"fallback": 0.3}, "30% of the images are no baseline JPEGs"),
        ({"path": None}, "the extension in C"),
        ({"decoding": {"stored": 1000.0, "seek": 1001.0, "packed": 1002.0}}, "nothing that we"),
    ],
)  # fmt: skip
def test_the_advice_is_the_first_thing_that_helps(changed: dict[str, Any], said: str) -> None:
    assert said in advice(FOUND | changed)
