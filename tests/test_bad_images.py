"""Damaged and odd images in a data set: training goes on, and says which are bad."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from tests.command_line import Capture, shown
from tests.data.tars import Patch, write_shard
from tests.errors import check, refused
from tests.images import encode
from trainyard.data.decode.crops import CentralCrop
from trainyard.data.index.build import open_index
from trainyard.data.index.table import Index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.sampler.plan import OnePassPlan
from trainyard.training import saver

SIDE = 32  # pixels
TOO_MANY = "data.too-many-bad-samples"
BAD = {
    "photo/start.jpg": "runcated",
    "photo/text.jpg": "not an image",
    "photo/truncated.jpg": "truncated",
}
STEPS = ("--run.length", "8 steps", "--run.eval_every", "0 steps", "--run.save_every", "4 steps")
DEBUG = ("debug", "--batch.size", "16", "--data.threads", "2", *STEPS)  # two epochs of training


def photographs(count: int) -> list[Image.Image]:
    """Squares of two real photographs."""
    squares = []
    for number in range(count):
        picture = load_sample_images().images[number % 2]
        left, top = 37 * number % 600, 29 * number % 380
        squares.append(Image.fromarray(picture[top : top + SIDE, left : left + SIDE]))
    return squares


def write_split(folder: Path, count: int) -> None:
    for name in ("digit", "photo"):
        (folder / name).mkdir(parents=True)
    for number, photo in enumerate(photographs(count)):
        photo.save(folder / "photo" / f"{number:02d}.jpg", quality=90)
        digit = Image.fromarray((load_digits().images[number] * 15).astype(np.uint8))
        digit.save(folder / "digit" / f"{number:02d}.png")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 images to train on, 3 bad and 2 odd, and 12 good ones. Not to be written to."""
    folder = tmp_path_factory.mktemp("mixed")
    write_split(folder / "train", 30)
    write_split(folder / "val", 6)
    photo = folder / "train" / "photo"
    shutil.move(photo / "29.jpg", photo / "truncated.jpg")
    os.truncate(photo / "truncated.jpg", (photo / "truncated.jpg").stat().st_size - 100)
    (photo / "start.jpg").write_bytes((photo / "00.jpg").read_bytes()[:300])
    (photo / "text.jpg").write_text("404 not found\n")
    first, second = photographs(42)[40:]
    first.convert("CMYK").save(photo / "cmyk.jpg", quality=90)
    second.save(photo / "png.JPEG", "PNG")
    return folder


@pytest.fixture
def data(mixed: Path, tmp_path: Path) -> Path:
    """A copy to damage further."""
    return Path(shutil.copytree(mixed, tmp_path / "data"))


def quarantined(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def check_quarantine(folder: Path, train: Path) -> None:
    """Exactly the bad ones, each once."""
    found = sorted(quarantined(folder), key=lambda line: str(line["file"]))
    assert [line["file"] for line in found] == [str(train / name) for name in BAD]
    for line, reason in zip(found, BAD.values(), strict=True):
        assert (line["split"], line["offset"]) == ("train", 0)
        assert reason in line["reason"]


def forget_the_end(folder: Path) -> None:
    """As if the run had been killed after its checkpoint of step 4."""
    shutil.rmtree(folder / "checkpoints" / "step-00000008")


# --- whole runs ---


def test_training_goes_on(mixed: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "run"
    train = ("train", *DEBUG, "--data", mixed, "--run", folder, "--data.max_bad", "0.05")
    out = shown(capsys, *train)
    check_quarantine(folder, mixed / "train")
    [last_line] = [line for line in out.splitlines() if line.startswith("step 8/8")]
    assert "  3 bad  " in last_line
    # Going on meets them again, and does not write them again.
    forget_the_end(folder)
    assert "going on from" in shown(capsys, *train)
    check_quarantine(folder, mixed / "train")


@pytest.mark.slow
def test_two_ranks_write_each_once(mixed: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "run"
    launch = ("launch", "local", *DEBUG, "--data", mixed, "--run", folder, "--ranks", "2")
    command = [sys.executable, "-m", "trainyard", *map(str, launch), "--data.max_bad", "0.05"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert "  3 bad  " in result.stdout
    check_quarantine(folder, mixed / "train")
    # One rank goes on with the run of two.
    forget_the_end(folder)
    train = ("train", *DEBUG, "--data", mixed, "--run", folder, "--data.max_bad", "0.05")
    assert "  3 bad  " in shown(capsys, *train)
    check_quarantine(folder, mixed / "train")


def test_more_than_max_bad_stops(mixed: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "run"
    train = ("train", *DEBUG, "--data", mixed, "--run", folder)
    error = refused(*train)  # 3 of 64 are more than 1%
    check(error, TOO_MANY, num_bad=3, num_samples=64, split="train", max_bad=0.01)
    check(error, TOO_MANY, path=folder / "quarantine.jsonl")
    check_quarantine(folder, mixed / "train")
    # Who finds that acceptable goes on, in the same directory.
    shown(capsys, *train, "--data.max_bad", "0.05")
    check_quarantine(folder, mixed / "train")


def test_a_checkpoint_comes_after_what_was_bad_before_it(
    mixed: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Who goes on from it does not meet those again in this epoch."""
    folder = tmp_path / "run"
    write, known = saver.write_checkpoint, []

    def watched(*arguments: Any, **options: Any) -> None:
        known.append(len(quarantined(folder)))
        write(*arguments, **options)

    monkeypatch.setattr(saver, "write_checkpoint", watched)
    where = ("--data", mixed, "--run", folder)
    shown(capsys, "train", *DEBUG, *where, "--data.max_bad", "0.05", "--run.log_every", "0 steps")
    assert known == [3, 3]  # after the first epoch and after the second


def test_bad_validation_images(data: Path, tmp_path: Path, capsys: Capture) -> None:
    (data / "val" / "digit" / "03.png").write_text("no image")
    folder = tmp_path / "run"
    train = ("train", *DEBUG, "--data", data, "--run", folder, "--data.max_bad")
    out = shown(capsys, *train, "0.1")
    assert "1 validation image could not be read" in out
    assert [line["split"] for line in quarantined(folder)].count("val") == 1
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    [val] = [line for line in map(json.loads, lines) if line["kind"] == "val"]
    assert (val["evaluated"], val["bad"]) == (11, 1)
    result = json.loads(shown(capsys, "evaluate", folder, "--json"))
    assert (result["samples"], result["bad"]) == (11, 1)
    file = str(data / "val" / "digit" / "03.png")
    assert [(one["file"], one["samples"]) for one in result["bad_reasons"]] == [(file, 1)]
    text = shown(capsys, "evaluate", folder)
    assert f"{file}: {result['bad_reasons'][0]['reason']}" in text
    assert result["top1"] == val["top1"]


def test_validation_images_that_are_all_bad(data: Path, tmp_path: Path, capsys: Capture) -> None:
    for path in (data / "val").glob("*/*"):
        path.write_text("no image")
    folder = tmp_path / "run"
    train = ("train", *DEBUG, "--data", data, "--run", folder, "--data.max_bad")
    check(refused(*train, "0.1"), TOO_MANY, num_bad=12, num_samples=12, split="val")
    shown(capsys, *train, "1")
    # An accuracy over no images is none.
    check(refused("evaluate", folder), "data.none-readable", location=f"{data}/val", num_images=12)


def test_files_that_go_away_or_change_while_training(
    data: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """An image of another size than at its indexing is no bad image."""
    open_index(str(data / "train"))
    monkeypatch.setattr("trainyard.data.index.build.is_stale", lambda index: False)  # not yet
    (data / "train" / "digit" / "00.png").unlink()
    photographs(1)[0].save(data / "train" / "digit" / "01.png")
    folder = tmp_path / "run"
    shown(capsys, "train", *DEBUG, "--data", data, "--run", folder, "--data.max_bad", "0.1")
    reasons = {Path(line["file"]).name: line["reason"] for line in quarantined(folder)}
    assert reasons.keys() == {"00.png", *(Path(name).name for name in BAD)}
    assert "No such file" in reasons["00.png"]


# --- pixels ---


def loaded(index: Index) -> dict[str, tuple[np.ndarray[Any, Any], float]]:
    """Whole images and weights, by file name, as the loader gives them to a trainer."""
    spec = LoaderSpec(
        plan=OnePassPlan(len(index), 16),
        crop=CentralCrop(SIDE, 1.0),
        image_size=SIDE,
        interpolation="bicubic",
        stop=-(-len(index) // 16),
        threads=2,
    )
    found = {}
    with Loader(index, spec) as loader:
        for batch in loader:
            for position, sample in enumerate(batch.ids.tolist()):
                name = Path(index.locate(sample)[0]).name
                pixels = batch.images_BHWC[position].copy()
                found[name] = pixels, float(batch.weights[position])
    return found


def test_odd_images_are_rgb_as_pillow_has_it(mixed: Path) -> None:
    images = loaded(open_index(str(mixed / "train")))
    for name in ("cmyk.jpg", "png.JPEG"):
        pixels, weight = images[name]
        expected = Image.open(mixed / "train" / "photo" / name)
        assert expected.mode == ("CMYK" if name == "cmyk.jpg" else "RGB")
        assert expected.format == ("JPEG" if name == "cmyk.jpg" else "PNG")
        assert np.array_equal(pixels, np.asarray(expected.convert("RGB")))
        assert weight == 1


def test_bad_images_are_black_and_weigh_nothing(mixed: Path) -> None:
    images = loaded(open_index(str(mixed / "train")))
    for name in BAD:
        pixels, weight = images[Path(name).name]
        assert not pixels.any()
        assert weight == 0
    assert sum(weight for _, weight in images.values()) == len(images) - len(BAD)


def test_the_offset_leads_to_the_bytes_in_a_shard(tmp_path: Path, capsys: Capture) -> None:
    images = [encode(photo) for photo in photographs(16)]
    for split in ("train", "val"):
        rows = [(image, number % 2) for number, image in enumerate(images)]
        rows[5] = (b"hello", 1) if split == "train" else rows[5]
        write_shard(tmp_path / f"{split}-000.tar", rows)
    folder = tmp_path / "run"
    shown(capsys, "train", *DEBUG, "--data", tmp_path, "--run", folder, "--data.max_bad", "0.1")
    [line] = quarantined(folder)
    assert line["id"] == 5
    content = Path(line["file"]).read_bytes()
    assert content[line["offset"] :].startswith(b"hello")
