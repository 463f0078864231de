"""Checkpoints evaluated: raw and averaged weights, other data, and what is asked beside."""

import json
import shutil
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tests.command_line import newest
from tests.conftest import SOME
from trainyard.config import RunConfig, load_recipe
from trainyard.data.index.build import open_index
from trainyard.run.build import build_feeds
from trainyard.run.evaluation import DataSetResult, EvaluationOptions, evaluate_checkpoint
from trainyard.run.model import build_run_model
from trainyard.training.evaluate import Views
from trainyard.training.predictions import Predictions
from trainyard.world import World

pytestmark = pytest.mark.slow


def recipe(folder: Path) -> RunConfig:
    return load_recipe(str(folder / "recipe.toml"))


def evaluate(folder: Path, **asked: Any) -> DataSetResult:
    console = Console(quiet=True)
    path, question = newest(folder), EvaluationOptions(**asked)
    return evaluate_checkpoint(recipe(folder), path, question, world=World(), console=console)


def equal(a: Predictions, b: Predictions) -> bool:
    return all(map(np.array_equal, astuple(a), astuple(b)))


@pytest.mark.quick
def test_raw_and_averaged_weights_are_those_that_training_evaluated(averaged: Path) -> None:
    result = evaluate(averaged)
    lines = (averaged / "metrics.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines if '"val"' in line][-1]
    found = result.as_dict()
    keys = [f"{prefix}{key}" for prefix in ("", "ema_") for key in ("top1", "top5", "loss")]
    assert {key: found[key] for key in keys} == {key: said[key] for key in keys}
    assert found["top1"] != found["ema_top1"]
    assert (found["samples"], found["bad"], found["not_finite"]) == (364, 0, 0)
    assert (found["classes"], found["model_classes"]) == (10, 10)


def test_a_checkpoint_without_an_average_has_one_result(finished: Path) -> None:
    result = evaluate(finished)
    assert list(result.predictions) == [""]


def plain_scores(folder: Path, where: Path, *, ema: bool) -> tuple[torch.Tensor, list[str]]:
    """All scores of the images at a place, and the names of their classes."""
    config, world = recipe(folder), World()
    index = open_index(str(where))
    model = build_run_model(config, 10)
    name = "ema.safetensors" if ema else "model.safetensors"
    model.load_state_dict(load_file(newest(folder) / name))
    model.eval()
    with torch.no_grad(), build_feeds(config, world, torch.device("cpu")).evaluation(index) as feed:
        scores = torch.cat([model(batch.images_BCHW) for batch in feed])
    return scores, [index.classes[label] for label in index.label]


@pytest.mark.parametrize("prefix", ["", "ema_"])
def test_data_of_some_classes_is_judged_among_those(
    prefix: str, averaged: Path, some: Path
) -> None:
    result = evaluate(averaged, data=str(some))
    assert result.classes == tuple(SOME)
    assert (result.as_dict()["classes"], result.as_dict()["model_classes"]) == (3, 10)
    scores, names = plain_scores(averaged, some, ema=bool(prefix))
    among = scores[:, [int(name) for name in SOME]].softmax(dim=1)
    said = result.predictions[prefix]
    guesses = [result.classes[int(guess)] for guess in said.guess]
    assert guesses == [SOME[guess] for guess in among.argmax(dim=1).tolist()]
    np.testing.assert_allclose(said.confidence, among.amax(dim=1), rtol=1e-5)
    right = np.mean([guess == name for guess, name in zip(guesses, names, strict=True)])
    assert result.as_dict()[f"{prefix}top1"] == right


def test_all_classes_may_be_guessed_if_asked(averaged: Path, some: Path) -> None:
    result = evaluate(averaged, data=str(some), all_classes=True)
    assert sorted(result.classes) == [str(digit) for digit in range(10)]
    scores, names = plain_scores(averaged, some, ema=False)
    said = result.predictions[""]
    guesses = [result.classes[int(guess)] for guess in said.guess]
    assert guesses == [str(guess) for guess in scores.argmax(dim=1).tolist()]
    assert not set(guesses) <= set(SOME)
    right = np.mean([guess == name for guess, name in zip(guesses, names, strict=True)])
    assert result.as_dict()["top1"] == right


def test_several_locations_are_one_data_set(averaged: Path, some: Path, digits: Path) -> None:
    result = evaluate(averaged, data=(str(some), str(digits / "train")))
    assert len(result.data.index) == 110 + 1433


# --- labels made anew ---


@pytest.fixture
def official(digits: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """Validation images by official names, and the class of each in their order."""
    paths = sorted((digits / "val").glob("*/*"), key=lambda path: path.name)
    for number, path in enumerate(paths, start=1):
        folder = tmp_path / "official" / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / f"ILSVRC2012_val_{number:08d}.png")
    return tmp_path / "official", [path.parent.name for path in paths]


def test_labels_made_anew(averaged: Path, official: tuple[Path, list[str]], tmp_path: Path) -> None:
    data, names = official
    labels = [[int(name), (int(name) + 1) % 10] for name in names]
    labels[5:30] = [[] for _ in range(25)]
    path = tmp_path / "real.json"
    path.write_text(json.dumps(labels))
    result = evaluate(averaged, data=str(data), labels=path)
    said = result.predictions[""]
    order = np.argsort([Path(result.data.index.locate(n)[0]).name for n in range(364)])
    guesses = said.guess[order].tolist()
    hits = [guess in right for guess, right in zip(guesses, labels, strict=True) if right]
    found = result.as_dict()["reassessed"]
    assert found["labels"] == str(path)
    assert found["samples"] == 364 - 25
    assert found["top1"] == np.mean(hits) > result.as_dict()["top1"]
    assert found["ema_top1"] != found["top1"]


# --- batch norm, flips ---


def test_statistics_are_of_images_that_are_not_mixed(digits: Path) -> None:
    keys = {"augment.mixup": "1.0", "augment.erasing": "1.0", "data.train": str(digits / "train")}
    config = load_recipe("digits", keys | {"batch.size": "32", "data.threads": "1"})
    index = open_index(str(digits / "train"))
    with build_feeds(config, World(), torch.device("cpu")).statistics(index, 40, 32) as feed:
        batches = list(feed)
    assert [len(batch.ids) for batch in batches] == [32, 32]  # 40, in whole batches
    assert len({int(sample) for batch in batches for sample in batch.ids}) == 64
    assert all((batch.lam == 1).all() for batch in batches)
    corners = torch.cat([batch.images_BCHW[:, :, 0, 0] for batch in batches])
    assert len(set(map(tuple, corners.tolist()))) < 40  # the digits' black ground, not noise


def test_a_flip_and_scales_are_named(averaged: Path) -> None:
    plain, *others = (
        evaluate(averaged, views=views) for views in (Views(), Views(True), Views(True, (1, 1.2)))
    )
    assert [other.as_dict()["flip"] for other in (plain, *others)] == [False, True, True]
    assert [other.as_dict()["scales"] for other in (plain, *others)] == [[1], [1], [1, 1.2]]
    assert not equal(plain.predictions[""], others[0].predictions[""])
    assert not equal(others[0].predictions[""], others[1].predictions[""])
