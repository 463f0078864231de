"""A run with model.linear_probe starts from the best classifier of its features."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from tests.command_line import Capture, shown
from tests.errors import raises
from tests.runs import assert_equal, assert_same_end, curve, cut_off, events, of_digits
from tests.spawn import spawn, train_joined
from trainyard.classifier import load
from trainyard.config import load_recipe
from trainyard.data.index.build import open_index
from trainyard.distributed import Heartbeat
from trainyard.run import build, probe
from trainyard.run.build import build_feeds
from trainyard.run.probe import evenly_spaced
from trainyard.world import World

ALONE = World()
NUM_STEPS = 4


def train(world: World, digits: Path, old: Path, folder: Path, **changes: str) -> None:
    """A few steps of the debug recipe, in one thread; keys with __ in place of the dot."""
    torch.set_num_threads(1)
    keys = {"run.length": f"{NUM_STEPS} steps", "run.eval_every": "2 steps", "data.threads": "1"}
    keys |= {"run.save_every": "2 steps", "run.keep": "9", "run.log_every": "1 step"}
    keys |= of_digits(digits) | {"model.checkpoint": str(old), "model.linear_probe": "true"}
    keys |= {key.replace("__", "."): text for key, text in changes.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # else one rank has the cores of three
        train_joined(load_recipe("debug", keys), folder, world)


def first(folder: Path) -> Path:
    return folder / "checkpoints" / "step-00000000"


def said(folder: Path) -> list[str]:
    found = [event["message"] for event in events(folder, "initial weights")]
    return [message for message in found if message.startswith("linear probe")]


@pytest.fixture(scope="module")
def probed(digits: Path, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    folder = tmp_path_factory.mktemp("probed") / "run"
    train(ALONE, digits, finished, folder)
    return folder


def test_it_is_scikit_learns_on_embeddings(digits: Path, probed: Path) -> None:
    """The checkpoint of step 0 has its classifier, and every later evaluation has its score."""
    classifier = load(first(probed))
    train, val = (open_index(str(digits / split)) for split in ("train", "val"))
    seen, asked = (classifier.predict_index(index, 1, embed=True) for index in (train, val))
    assert seen.vectors is not None and asked.vectors is not None
    scale, centre = np.sqrt(seen.vectors.var(0) + seen.vectors.var(0).mean()), seen.vectors.mean(0)
    standard, asked_ND = ((of - centre) / scale for of in (seen.vectors, asked.vectors))
    inverse = 1 / (1e-4 * len(train))
    there = LogisticRegression(C=inverse, max_iter=5000).fit(standard, train.label)
    expected = there.predict(asked_ND)
    assert "penalty 0.0001" in said(probed)[0]
    assert (asked.classes[:, 0] == expected).mean() > 0.99
    top1 = float((asked.classes[:, 0] == val.label).mean())
    evaluations = curve(probed, "val", "top1", "linear_probe")
    assert list(evaluations) == [0, 2, 4]
    assert evaluations[0][0] == pytest.approx(top1)
    assert {of for _, of in evaluations.values()} == {evaluations[0][0]}


def test_the_page_has_it(probed: Path, tmp_path: Path, capsys: Capture) -> None:
    shown(capsys, "report", probed, "--out", tmp_path / "page.html")
    top1 = curve(probed, "val", "top1")[0][0]
    page = (tmp_path / "page.html").read_text()
    assert f"<dt>Linear probe</dt><dd><span class=figure>{top1:.2%}" in page.replace('"', "")


def test_a_run_that_goes_on_fits_nothing(
    digits: Path, finished: Path, probed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "put_probe", None)
    for step in (0, 2):
        folder = cut_off(probed, tmp_path / f"{step}", step)
        train(ALONE, digits, finished, folder)
        assert_same_end(folder, probed, NUM_STEPS)
        assert len(said(folder)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("averager", ["allreduce", "sharded"])
def test_any_number_of_ranks_has_the_same_bits(
    averager: str, digits: Path, finished: Path, probed: Path, tmp_path: Path
) -> None:
    """Three ranks have unequal shares of 23 batches."""
    spawn(_on_ranks, 3, digits, finished, tmp_path / "run", averager)
    ours, alone = (
        load_file(first(run) / "model.safetensors") for run in (tmp_path / "run", probed)
    )
    assert_equal(ours, alone)


def _on_ranks(world: World, digits: Path, old: Path, folder: Path, averager: str) -> None:
    train(world, digits, old, folder, run__length="1 step", average__name=averager)


def test_lists_of_labels(listed_digits: Path, finished: Path, tmp_path: Path) -> None:
    keys = {f"data__{split}": f"{listed_digits}#{split}" for split in ("train", "val")}
    keys |= {"loss__name": "bce", "run__best_by": "map"}
    train(ALONE, listed_digits, finished, tmp_path / "run", **keys)
    ((before, score),) = [curve(tmp_path / "run", "val", "map", "linear_probe")[0]]
    assert before == score > 0.5


def test_weights_of_classes_count(digits: Path, finished: Path, tmp_path: Path) -> None:
    weights = json.dumps([1000.0] + [1.0] * 9)
    train(ALONE, digits, finished, tmp_path / "run", loss__class_weights=weights)
    index = open_index(str(digits / "val"))
    found = load(first(tmp_path / "run")).predict_index(index, 1)
    assert found.counts[0] > 1.5 * index.samples_per_class()[0]


def test_classes_of_weight_0_have_no_part(digits: Path) -> None:
    """All that were held out were of such a class, and the penalty was chosen by a loss of NaN."""
    index = open_index(str(digits / "val"))
    ids = np.concatenate([np.flatnonzero(index.label == n)[: 10 if n else 4] for n in (0, 1)])
    rows = torch.cat([torch.ones(14, 1), torch.randn(14, 3)], dim=1)
    config = load_recipe("debug", {"loss.class_weights": json.dumps([1.0] + [0.0] * 9)})
    found = probe._fitted(config, index, ids, rows, on_value=lambda: None)
    assert (found.num_held_out, found.strength) == (0, 0.1)


def test_images_that_cannot_be_read_have_no_part(
    digits: Path, finished: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(digits, copied)
    paths = sorted((copied / "train").glob("*/*"))
    for path in paths[::100]:
        os.truncate(path, 40)
    keys = {"data__max_bad": "1.0"}
    train(ALONE, copied, finished, tmp_path / "some", **keys)
    assert f"{len(paths) - len(paths[::100]):,} of {len(paths):,}" in said(tmp_path / "some")[0]
    for path in paths:
        os.truncate(path, 40)
    with raises("data.none-readable"):
        train(ALONE, copied, finished, tmp_path / "none", **keys)


def test_it_is_scored_with_the_statistics_that_it_saw(
    digits: Path, averaged: Path, tmp_path: Path
) -> None:
    scores = []
    for samples in ("0", "64"):
        keys = {"model__name": "test_resnet", "run__bn_samples": samples, "run__length": "1 step"}
        train(ALONE, digits, averaged, tmp_path / samples, **keys)
        scores.append(curve(tmp_path / samples, "val", "loss")[0])
    assert scores[0] == scores[1]


def test_of_many_images_every_nth_is_seen(digits: Path) -> None:
    index = open_index(str(digits / "train"))
    assert np.array_equal(evenly_spaced(index, 9999), np.arange(len(index)))
    found = evenly_spaced(index, 100)
    assert (np.diff(found) > 0).all()
    counts = np.bincount(index.label[found], minlength=10)
    assert np.abs(counts - 100 * index.samples_per_class() / len(index)).max() < 1


def test_statistics_of_random_weights_are_not_kept() -> None:
    with raises("recipe.keys-conflict", other="model.freeze_statistics"):
        load_recipe("debug", {"model.freeze_statistics": "true"})


@pytest.mark.parametrize(
    "keys", [{"model.checkpoint": "none"}, {"data.order": "join", "model.checkpoint": "timm"}]
)
def test_what_cannot_be_probed_is_refused(keys: dict[str, str]) -> None:
    with raises("recipe.keys-conflict", other="model.linear_probe"):
        load_recipe("debug", keys | {"model.linear_probe": "true"})


class _Scaled(nn.Module):
    """A model whose scores are not those of its classifier."""

    def __init__(self, num_classes: int, kind: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, 8)
        self.head = nn.Linear(8, num_classes, bias=kind != "no bias")
        self.kind = kind

    def get_classifier(self) -> nn.Module:
        return self.stem if self.kind == "convolution" else self.head

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features_BC = self.stem(images_BCHW).mean(dim=(2, 3))
        if self.kind == "overflows":
            features_BC = torch.where(features_BC[:, :1] > 0, features_BC, torch.inf)
        scores_BC: Tensor = self.head(features_BC)
        return scores_BC * (2.0 if self.kind == "scaled" else 1.0)


def put_probe(model: nn.Module, digits: Path) -> str:
    config = load_recipe("debug", of_digits(digits))
    return probe.put_probe(
        config,
        model,
        open_index(str(digits / "val")),
        build_feeds(config, ALONE, torch.device("cpu")),
        console=Console(quiet=True),
        heartbeat=Heartbeat(),
    )


@pytest.mark.parametrize("kind", ["scaled", "no bias", "convolution"])
def test_a_model_without_a_linear_classifier_is_refused(kind: str, digits: Path) -> None:
    with raises("model.no-linear-classifier"):
        put_probe(_Scaled(10, kind), digits)


def test_images_whose_features_overflow_have_no_part(digits: Path) -> None:
    torch.manual_seed(0)
    model = _Scaled(10, "overflows")
    found = re.search(r"([0-9]+) of 364 images", put_probe(model, digits))
    assert found is not None and 0 < int(found[1]) < 364
    assert model.head.weight.isfinite().all() and model.head.bias.isfinite().all()
