import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command_line import SHORT, Capture, run, shown
from tests.errors import check, refused
from trainyard.classifier import load
from trainyard.errors import DiskError
from trainyard.report.images import _colour, matrix_image
from trainyard.report.judgement import Matrix
from trainyard.report.pictures import _as_uri, open_album
from trainyard.report.runs import read_runs
from trainyard.training.recorded import load_recorded

pytestmark = pytest.mark.slow


def test_the_report_lies_in_the_run_directory(copied: Path, capsys: Capture) -> None:
    said = shown(capsys, "report", copied)
    assert said.startswith(f"{copied / 'report.html'} (")
    assert (copied / "report.html").read_text().startswith("<!doctype html>")


def test_of_several_runs_it_lies_here(
    trained: list[Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert json.loads(shown(capsys, "report", *trained, "--json")) == {
        "report": "report.html",
        "bytes": (tmp_path / "report.html").stat().st_size,
        "runs": [str(folder) for folder in trained],
    }


def test_another_file(copied: Path, tmp_path: Path, capsys: Capture) -> None:
    (copied / "report.html").unlink()  # that of the end of training
    shown(capsys, "report", copied, "--out", tmp_path / "of mine.html")
    assert (tmp_path / "of mine.html").exists()
    assert not (copied / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["/nowhere"], "run.not-a-run-directory"),
        (["RUN", "--out", "report.pdf"], "option.wrong-suffix"),
        (["RUN", "--out", "/nowhere/report.html"], "file.unwritable"),
        (["RUN", "RUN"], "report.run-given-twice"),
        (["RUN", "--optim.lr", "1"], "option.takes-no-recipe-keys"),
    ],
)
def test_mistakes_are_named(words: list[str], code: str, trained: list[Path]) -> None:
    filled = [str(trained[0]) if word == "RUN" else word for word in words]
    check(refused("report", *filled), code)


def test_a_report_needs_no_torch(copied: Path) -> None:
    code = (
        "import sys; from trainyard.command_line import main; "
        f"main(['report', {str(copied)!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_maps_lie_beside_the_pictures(copied: Path, tmp_path: Path) -> None:
    outs = [tmp_path / name for name in ("plain.html", "maps.html")]
    assert run("report", copied, "--out", outs[0]) == 0
    assert run("report", copied, "--out", outs[1], "--cam") == 0
    plain, maps = (out.read_text() for out in outs)
    tiles = plain.count('class="picture"')  # of errors and of right predictions
    assert tiles > 22 and maps.count('class="pair"') == tiles
    assert maps.count("<img") == plain.count("<img") + tiles and 'class="pair"' not in plain
    recorded = load_recorded(copied / "predictions.npz")
    assert recorded is not None
    wrong = np.flatnonzero(recorded.scores.rank_of_truth > 1)
    sample = int(wrong[recorded.scores.loss[wrong].argmax()])
    (read,) = read_runs([copied])
    index = open_album(read).index
    assert index is not None
    content = Path(index.locate(sample)[0]).read_bytes()
    assert _as_uri(load(copied).overlay(content, int(recorded.scores.guess[sample]))) in maps


def test_pictures_lie_beside_the_report(copied: Path, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "pages" / "of mine.html"
    page.parent.mkdir()
    told = json.loads(shown(capsys, "report", copied, "--out", page, "--png", "--json"))
    names = [f"of mine-{name}.png" for name in ("curves", "confusion", "worst", "batch")]
    assert told["pictures"] == [str(page.parent / name) for name in names]
    assert {path.name for path in page.parent.iterdir()} == {page.name, *names}
    colours = {}
    for path in map(Path, told["pictures"]):
        with Image.open(path) as image:
            assert image.format == "PNG" and 600 <= image.width <= 1200
            assert image.getpixel((0, 0)) == (255, 255, 255)
            colours[path.name] = {colour for _, colour in image.getcolors(1 << 20) or ()}
    lines = {_colour(f"c{n}") for n in range(3)}  # training, validation, average
    assert lines <= colours[names[0]]
    assert _colour("red", 0.07) in colours[names[1]] or _colour("red", 0.14) in colours[names[1]]


@pytest.mark.parametrize("count", [3, 12])
def test_any_name_can_be_drawn(count: int) -> None:
    """Pillow draws no bytes that are not UTF-8, and no empty picture; across and upright."""
    names = ["", "a\udcff \x00 b", "x" * 200] * (count // 3)
    image = matrix_image(Matrix(names, np.eye(count, dtype=np.int64), ""), "t\udcff")
    assert image.width == 1200


def test_pictures_that_cannot_be_made_are_named(
    copied: Path, digits: Path, capsys: Capture
) -> None:
    recipe = (copied / "recipe.toml").read_text()
    (copied / "recipe.toml").write_text(recipe.replace(str(digits), "/nowhere/at/all"))
    assert run("report", copied, "--png") == 0
    said = capsys.readouterr()
    assert {path.name for path in copied.glob("*.png")} == {"curves.png", "confusion.png"}
    assert "no worst.png: " in said.err and "no batch.png: " in said.err
    assert said.err.count("/nowhere/at/all") == 2
    (copied / "recipe.toml").write_text(recipe)
    environment = json.loads((copied / "environment.json").read_text())
    environment["fingerprints"]["train"] = "other"
    (copied / "environment.json").write_text(json.dumps(environment))
    assert run("report", copied, "--png") == 0
    assert (copied / "worst.png").exists() and not (copied / "batch.png").exists()


def test_maps_need_a_checkpoint(copied: Path) -> None:
    shutil.rmtree(copied / "checkpoints")
    (copied / "checkpoints").mkdir()
    check(refused("report", copied, "--cam"), "checkpoint.none-yet", path=copied)


def _bug(folders: object) -> Path:
    raise KeyError("top1")


def _full(folders: object) -> Path:
    raise DiskError(errno.ENOSPC, "No space left on device", "report.html")


@pytest.mark.parametrize("write_report", [_bug, _full])
def test_a_finished_run_without_its_report_is_a_finished_run(
    write_report: Callable[[object], Path],
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """A bug in the report was a traceback and exit code 1, after days of training."""
    monkeypatch.setattr("trainyard.report.page.write_report", write_report)
    assert run("train", "debug", "--data", digits, "--run", tmp_path / "a run", *SHORT) == 0
    said = capsys.readouterr()
    assert f"`trainyard report '{tmp_path / 'a run'}'`" in said.err
    assert said.err.count("\n") == 1
