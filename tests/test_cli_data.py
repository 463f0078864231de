"""`data show`, `data verify` and `data prepare` as commands."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.command_line import Capture, run, shown
from tests.errors import check, raises, refused
from tests.full_disk import full_disk
from trainyard.datasets.prepare.preparation import make_folder

# --- data show ---


def test_show_says_how_large_images_are(digits: Path, capsys: Capture) -> None:
    about = json.loads(shown(capsys, "data", "show", digits / "val", "--json"))
    sizes = sorted(path.stat().st_size for path in digits.glob("val/*/*.png"))
    assert about["image_bytes"]["min"] == sizes[0]
    assert about["image_bytes"]["max"] == sizes[-1]
    assert about["image_bytes"]["median"] == (sizes[181] + sizes[182]) // 2
    assert "smallest image" in shown(capsys, "data", "show", digits)


def test_show_names_the_largest_and_smallest_of_many_classes(
    digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    image = next(digits.glob("train/0/*.png"))
    for number in range(40):
        folder = tmp_path / f"class-{number:02d}"
        folder.mkdir()
        for copy in range(1 + number % 20 + number // 20 * 40):
            os.link(image, folder / f"{copy}.png")
    table = shown(capsys, "data", "show", tmp_path)
    assert "class-39" in table  # 60 images
    assert "class-30" in table  # 51, the tenth from above
    assert "class-29" not in table
    assert "class-10" not in table
    assert "class-09" in table  # 10, the tenth from below
    assert "class-00" in table
    assert "20 more" in table
    assert "40 classes" in table


def test_show_draws_a_sheet(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    first, second, other = (tmp_path / f"{name}.png" for name in "abc")
    said = shown(capsys, "data", "show", digits, "--out", first)
    assert f"contact sheet in {first}" in said
    shown(capsys, "data", "show", digits, "--out", second, "--split", "train", "--json")
    assert first.read_bytes() == second.read_bytes()
    shown(capsys, "data", "show", digits, "--out", other, "--seed", 1)
    assert first.read_bytes() != other.read_bytes()
    few = ("--rows", 2, "--columns", 9, "--class", "7", "--split", "val")
    shown(capsys, "data", "show", digits, "--out", other, *few)
    with Image.open(other) as sheet:
        assert sheet.width > 3 * sheet.height


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--out a.jpg", "option.wrong-suffix"),
        ("--out a.png --rows 0", "option.invalid"),
        ("--out a.png --columns 101", "option.invalid"),
        ("--out a.png --split test", "data.no-such-split"),
        ("--rows 3", "option.needs-sheet"),
        ("--out a.png --class seven", "data.no-such-class"),
        ("--out no/such/a.png", "option.file-unwritable"),
    ],
)
def test_mistakes_with_sheets(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    check(refused("data", "show", digits, *options.split()), code)
    assert list(tmp_path.iterdir()) == []


def test_a_class_that_was_meant(tmp_path: Path, digits: Path) -> None:
    (tmp_path / "siamese cat").mkdir()
    shutil.copy(next(digits.glob("train/0/*.png")), tmp_path / "siamese cat")
    show = ("data", "show", tmp_path, "--out", tmp_path / "a.png", "--class", "siamese")
    check(refused(*show), "data.no-such-class", name="siamese")


# --- data verify ---


def test_verify_says_that_all_is_well(digits: Path, capsys: Capture) -> None:
    table = shown(capsys, "data", "verify", digits)
    assert table.endswith("no problems, no notes\n")
    result = json.loads(shown(capsys, "data", "verify", digits, "--deep", "--json"))
    assert result["is_well"] is True
    assert {check["result"] for check in result["checks"]} == {"ok"}
    by_name = {(check["data"], check["name"]): check for check in result["checks"]}
    assert by_name["train", "images"]["about"] == "1,433 of 1,433 decode"
    assert by_name["train, val", "leakage"]["count"] == 0


def test_verify_lists_what_is_wrong(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    """Twenty of each on the terminal, all as JSON; notes alone are no failure."""
    data = Path(shutil.copytree(digits, tmp_path / "data"))
    shutil.copy(next(data.glob("train/0/*.png")), data / "train" / "0" / "again.png")
    shutil.rmtree(data / "train" / ".trainyard-index", ignore_errors=True)
    for split in ("train", "val"):
        (data / split / ".trainyard-index").unlink(missing_ok=True)
    table = shown(capsys, "data", "verify", data, "--deep")
    assert "note: train: duplicates\n" in table
    assert table.endswith("no problems, 1 note\n")
    for number in range(25):
        (data / "val" / "3" / f"bad-{number:02d}.png").write_text("no image")
    capsys.readouterr()
    assert run("data", "verify", data, "--deep", "--processes", 1) == 2
    said = capsys.readouterr()
    assert said.err == ""
    assert f"{data}/val/3/bad-19.png: not an image\n" in said.out
    assert "bad-20.png: not an image" not in said.out
    assert "and 5 more" in said.out
    assert "25 problems, " in said.out
    assert run("data", "verify", data, "--deep", "--json") == 2
    result = json.loads(capsys.readouterr().out)
    assert result["is_well"] is False
    [images] = [c for c in result["checks"] if (c["data"], c["name"]) == ("val", "images")]
    assert (images["result"], images["count"]) == ("problem", 25)
    listed = {(Path(row["file"]).name, row["code"], row["offset"]) for row in images["found"]}
    assert listed == {(f"bad-{number:02d}.png", "verify.undecodable", 0) for number in range(25)}


def test_mistakes_with_verify(digits: Path, tmp_path: Path) -> None:
    check(
        refused("data", "verify", digits, "--processes", 0), "option.invalid", option="--processes"
    )
    check(refused("data", "verify", tmp_path), "data.no-images", location=tmp_path)
    check(refused("data", "verify", tmp_path / "none"), "data.not-found")


# --- data verify, interrupted ---


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """One large image under many names: half a minute of decoding."""
    (tmp_path / "slow" / "class").mkdir(parents=True)
    first = tmp_path / "slow" / "class" / "0.png"
    Image.effect_noise((3000, 2000), 60).save(first, compress_level=1)
    for number in range(1, 1000):
        os.link(first, first.with_name(f"{number}.png"))
    return tmp_path / "slow"


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def decoders(process: "subprocess.Popen[str]") -> list[int]:
    """The processes that decode, once they do."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [
            pid
            for pid in children(process.pid)
            if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        busy = [pid for pid in found if _cpu_ticks(pid) > 60]  # of 10 ms: beyond its imports
        if len(busy) == 2:
            return busy
        time.sleep(0.05)
    raise AssertionError("no processes that decode")


def _cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_verify(location: Path, tmp_path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trainyard", "data", "verify", str(location), "--deep"]
    (tmp_path / "scratch").mkdir()
    return subprocess.Popen(
        [*command, "--processes", "2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "scratch")},
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ["Ctrl-C", "a decoder dies", "killed"])
def test_nothing_survives_an_early_end(slow: Path, tmp_path: Path, end: str) -> None:
    process = start_verify(slow, tmp_path)
    workers = decoders(process)
    if end == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
    else:
        os.kill(process.pid if end == "killed" else workers[0], signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert process.returncode == {"Ctrl-C": 130, "a decoder dies": 2}.get(end, -signal.SIGKILL)
    code = json.loads(out)["error"]["code"] if out else None
    assert code == ("verify.worker-died" if end == "a decoder dies" else None)
    assert "Traceback" not in err
    deadline = time.monotonic() + (10 if end == "killed" else 0)
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    assert end != "Ctrl-C" or list((tmp_path / "scratch").iterdir()) == []


# --- data prepare ---


def test_a_disk_that_digits_cannot_be_written_to(tmp_path: Path, capsys: Capture) -> None:
    error = refused("data", "prepare", "digits", "/proc/none/digits")
    check(error, "prepare.folder-unwritable", path="/proc/none")
    with full_disk(50):
        assert run("data", "prepare", "digits", tmp_path / "digits") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file", "/proc"])
def test_a_folder_of_a_preparation_that_cannot_be_made(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises("prepare.folder-unwritable"):
        make_folder(tmp_path / place / "out")
