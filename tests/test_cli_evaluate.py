"""`trainyard evaluate`: what it prints, and what it takes."""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.command_line import Capture, newest, run, shown
from tests.errors import check, raises, refused
from tests.full_disk import full_disk
from trainyard.cli.evaluate import write_predictions
from trainyard.files import sha256


def result(capsys: Capture, *arguments: object) -> Any:
    return json.loads(shown(capsys, "evaluate", *arguments, "--json"))


@pytest.mark.parametrize("columns", [200, 40])
def test_the_table_has_a_row_for_each_kind_of_weights(
    columns: int, averaged: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow terminal loses no column."""
    monkeypatch.setenv("COLUMNS", str(columns))
    found, table = result(capsys, averaged), shown(capsys, "evaluate", averaged)
    for prefix in ("", "ema_"):
        assert all(text in table for text in in_table(found, prefix))


SHARES = ("top1", "balanced_accuracy", "macro_f1")  # of ten classes; without top-5


def in_table(found: dict[str, Any], prefix: str) -> list[str]:
    shares = [f"{found[prefix + key]:.2%}" for key in SHARES]
    return [*shares, *(f"{found[prefix + key]:.4f}" for key in ("loss", "ece"))]


def test_other_data_of_some_classes(averaged: Path, some: Path, capsys: Capture) -> None:
    few = result(capsys, averaged, "--data", some)
    assert (few["data"], few["samples"]) == (str(some), 110)
    assert (few["classes"], few["model_classes"]) == (3, 10)


def test_recipe_keys_of_an_evaluation(averaged: Path, capsys: Capture) -> None:
    cropped = result(capsys, averaged, "--batch.size", 7, "--data.crop_pct=0.5", "--flip")
    assert cropped["flip"] is True
    assert cropped["loss"] != result(capsys, averaged)["loss"]


@pytest.fixture
def changed(finished: Path, digits: Path, tmp_path: Path) -> Path:
    """A run one of whose training images lies among the validation images now."""
    data, folder = tmp_path / "digits", tmp_path / "run"
    shutil.copytree(digits, data, ignore=shutil.ignore_patterns(".trainyard*"))
    shutil.copytree(finished, folder, symlinks=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(digits), str(data)))
    next((data / "train" / "3").iterdir()).rename(data / "val" / "3" / "moved.png")
    return folder


def test_validation_data_that_has_changed_is_remarked(
    changed: Path, finished: Path, capsys: Capture
) -> None:
    """Only a part of the training data was compared: trained images raised the accuracy."""
    assert "have been trained on some" in shown(capsys, "evaluate", changed)
    assert "have been trained on some" not in shown(capsys, "evaluate", finished)
    assert run("evaluate", changed, "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["samples"] == 365 and "have been trained on some" in said.err


def test_details(averaged: Path, capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "said.csv"
    details = ("--per-class", 20, "--confusions", 3, "--wrong", 5)
    found = result(capsys, averaged, *details, "--out", file)
    with open(file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["weights"] for row in rows] == ["raw"] * 364 + ["EMA"] * 364
    for prefix, weights in (("", "raw"), ("ema_", "EMA")):
        own = [row for row in rows if row["weights"] == weights]
        assert np.mean([row["place"] == "1" for row in own]) == found[f"{prefix}top1"]
        assert all((row["place"] == "1") == (row["class"] == row["guess"]) for row in own)
        assert all(Path(row["file"]).parent.name == row["class"] for row in own)
        assert len(found[f"{prefix}per_class"]) == 10
        for line in found[f"{prefix}per_class"]:
            mine = [int(row["place"]) for row in own if row["class"] == line["class"]]
            assert len(mine) == line["samples"]
            assert line["recall"] == pytest.approx(np.mean([place == 1 for place in mine]))
            assert line["guesses"] == sum(row["guess"] == line["class"] for row in own)
            assert line["top5"] == pytest.approx(np.mean([place <= 5 for place in mine]))
        assert len(found[f"{prefix}confusions"]) == 3
        for line in found[f"{prefix}confusions"]:
            pair = (line["class"], line["guess"])
            assert sum((row["class"], row["guess"]) == pair for row in own) == line["samples"]
    wrong = {(row["file"], row["class"], row["guess"]) for row in rows if row["place"] != "1"}
    assert len({row["file"] for row in found["wrong"]}) == 5
    assert {(row["file"], row["class"], row["guess"]) for row in found["wrong"]} <= wrong
    text = shown(capsys, "evaluate", averaged, "--wrong", 5, "--out", tmp_path / "tables")
    assert all(f"{row['file']}: {row['class']}, taken for" in text for row in found["wrong"])
    names = re.findall(rf"^written: {tmp_path}/tables/(\w+)", text, re.MULTILINE)
    assert {f"{name}.csv" for name in names} == {*os.listdir(tmp_path / "tables")}


def test_tables_in_files(averaged: Path, capsys: Capture, tmp_path: Path) -> None:
    found = result(capsys, averaged, "--per-class", 10, "--out", tmp_path / "tables")
    tables = {}
    for name in ("classes", "confusions", "reliability"):
        with open(tmp_path / "tables" / f"{name}.csv", newline="") as lines:
            tables[name] = [row for row in csv.DictReader(lines) if row["weights"] == "EMA"]
    for line, row in zip(found["ema_per_class"], tables["classes"], strict=True):
        assert {key: str(value) for key, value in line.items()}.items() <= row.items()
    right = [int(row["samples"]) for row in tables["confusions"] if row["class"] == row["guess"]]
    assert sum(right) / 364 == found["ema_top1"]
    assert sum(int(row["samples"]) for row in tables["confusions"]) == 364
    gaps = [
        int(row["samples"]) * abs(float(row["confidence"]) - float(row["accuracy"]))
        for row in tables["reliability"]
    ]
    assert sum(gaps) / 364 == pytest.approx(found["ema_ece"])
    low, high = found["ema_top1_interval"]
    assert low < found["ema_top1"] < high
    (tmp_path / "file").touch()
    command = ("evaluate", averaged, "--out", tmp_path / "file")
    check(refused(*command), "option.file-unwritable", path=tmp_path / "file")


def test_a_full_disk_leaves_no_part_of_the_predictions(tmp_path: Path) -> None:
    empty: Any = SimpleNamespace(
        predictions={}, data=SimpleNamespace(index=SimpleNamespace(lists=None))
    )
    with full_disk(10), raises("option.file-unwritable", path=tmp_path / "said.csv"):
        write_predictions(tmp_path / "said.csv", empty)
    assert list(tmp_path.iterdir()) == []


def test_scores_that_are_not_finite(averaged: Path, tmp_path: Path, capsys: Capture) -> None:
    """A checkpoint of a run that has diverged: everything is wrong, and JSON stays JSON."""
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", averaged, folder], check=True)
    path = newest(folder) / "model.safetensors"
    weights = load_file(path)
    save_file({name: tensor * math.nan for name, tensor in weights.items()}, path)
    manifest = path.parent / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {path.name: sha256(path)}))
    file = tmp_path / "said.csv"
    found = result(capsys, folder, "--out", file)
    assert (found["top1"], found["top5"], found["loss"]) == (0, 0, None)
    assert (found["not_finite"], found["ema_not_finite"]) == (364, 0)
    assert found["ema_loss"] > 0
    with open(file, newline="") as lines:
        guesses = {row["guess"] for row in csv.DictReader(lines) if row["weights"] == "raw"}
    assert guesses == {""}  # not the last class
    shown(capsys, "evaluate", folder, "--per-class", 3, "--confusions", 3)


@pytest.mark.night
def test_two_ranks_say_what_one_says(averaged: Path, some: Path, capsys: Capture) -> None:
    options = [str(averaged), "--data", str(some), "--per-class", "10", "--confusions", "9"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--"]
    command += ["trainyard", "evaluate", *options, "--json"]
    ended = subprocess.run(command, check=True, timeout=200, capture_output=True, env=os.environ)
    alone = result(capsys, *options)
    both = json.loads(ended.stdout)
    assert alone.keys() == both.keys()
    bins = zip(alone.pop("reliability"), both.pop("reliability"), strict=True)
    assert all(one == pytest.approx(other, rel=1e-5) for one, other in bins)
    for key, value in alone.items():
        close = key.endswith(("loss", "ece"))  # other batches round otherwise
        assert both[key] == (pytest.approx(value, rel=1e-5) if close else value), key
