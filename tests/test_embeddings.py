"""Embeddings of images in a file, and images that look alike."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
from trainyard.classifier import load
from trainyard.datasets.near_duplicates import near_duplicates
from trainyard.model.adapt import classifier_layers


def test_they_are_what_the_classifier_layer_gets(
    averaged: Path, digits: Path, tmp_path: Path
) -> None:
    """One line for each image that can be read, in the order of the paths; also with --flip."""
    folder = tmp_path / "images"
    shutil.copytree(digits / "val" / "3", folder)
    (folder / "bad.png").write_text("no image")
    file = tmp_path / "e.npz"
    assert run("predict", averaged, folder, "--out", file, "--flip") == 0
    found = np.load(file)
    classifier = load(averaged)
    paths = sorted(str(path) for path in folder.iterdir() if path.name != "bad.png")
    assert found["paths"].tolist() == paths
    (layer,) = classifier_layers(classifier.model)
    with torch.no_grad():
        logits = layer(torch.from_numpy(found["vectors"]))
    assert torch.allclose(logits, classifier.logits(classifier.preprocess(paths)), atol=1e-4)
    assert found["vectors"].dtype == np.float32
    flipped = [guesses[0].name for guesses in classifier.predict(paths, flip=True)]
    assert found["classes"].tolist() == flipped


def test_an_image_saved_again_looks_alike(
    finished: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "images"
    shutil.copytree(digits / "val" / "3", folder)
    first = min(folder.iterdir())
    with Image.open(first) as image:
        image.save(folder / "again.jpg", quality=95)
    file = tmp_path / "pairs.csv"
    shown(capsys, "predict", finished, folder, "--duplicates", file, "--similar", 0.5)
    with open(file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {rows[0]["path_1"], rows[0]["path_2"]} == {str(first), str(folder / "again.jpg")}
    cosines = [float(row["cosine"]) for row in rows]
    assert cosines == sorted(cosines, reverse=True) and cosines[-1] >= 0.5


def test_a_cosine_needs_a_list_of_pairs(averaged: Path, digits: Path) -> None:
    command = ("predict", averaged, digits / "val" / "3", "--similar", "0.5")
    check(refused(*command), "option.similar-without-duplicates")


@pytest.mark.parametrize("block", [7, 16, 1000])
def test_blocks_find_the_pairs_of_the_whole(block: int) -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    vectors[17], vectors[20] = 3 * vectors[4], 0
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    rows, columns = np.nonzero(np.triu(unit @ unit.T >= 0.8, 1))
    found = near_duplicates(vectors, 0.8, block_rows=block)
    assert found.numbers[0].tolist() == [4, 17] and found.cosines[0] == pytest.approx(1)
    assert sorted(map(tuple, found.numbers.tolist())) == list(
        zip(rows.tolist(), columns.tolist(), strict=True)
    )
    least = near_duplicates(vectors[:20], 0.0, block_rows=block).numbers
    assert (least[:, 0] < least[:, 1]).all()
    best = near_duplicates(vectors, 0.8, limit=5, block_rows=block)
    assert best.cosines.tolist() == found.cosines[:5].tolist()


@pytest.mark.parametrize("columns", [3, 64, 2048])
def test_a_row_and_its_copy_have_a_cosine_of_one(columns: int) -> None:
    """Their product is a rounding below 1; rows of zeros have no pair, even of a cosine of 0."""
    rows = np.random.default_rng(0).normal(size=(60, columns)).astype(np.float32)
    scales = np.geomspace(1e-3, 1e3, 60, dtype=np.float32)[:, None]
    found = near_duplicates(np.concatenate([rows, scales * rows]), 1.0)
    assert sorted(map(tuple, found.numbers.tolist())) == [(n, n + 60) for n in range(60)]
    assert found.cosines.max() <= 1
    rows[[7, 9]] = 0
    assert not np.isin(near_duplicates(rows, 0.0).numbers, [7, 9]).any()
