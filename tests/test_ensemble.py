"""Several runs together: the mean of their weights, or of their probabilities."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command_line import Capture, newest, run, shown
from tests.errors import check, raises, refused
from trainyard.classifier import load
from trainyard.files import sha256

pytestmark = pytest.mark.slow


def moved(source: Path, folder: Path, sign: float) -> Path:
    """A copy of a run whose weights are noise apart, by a factor."""
    shutil.copytree(source, folder, symlinks=True)
    path = newest(folder) / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    weights = load_file(path)
    for name, tensor in weights.items():
        if tensor.ndim > 1:
            noise = torch.randn(tensor.shape, generator=generator)
            weights[name] = tensor + sign * tensor.std() * noise
    save_file(weights, path)
    manifest = path.parent / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {path.name: sha256(path)}))
    return folder


@pytest.fixture(scope="module")
def pair(averaged: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs, each bad; the mean of their weights is a good one's."""
    folder = tmp_path_factory.mktemp("pair")
    return [moved(averaged, folder / f"{sign}", sign) for sign in (1.0, -1.0)]


def test_the_mean_of_weights_is_that_of_the_models(
    pair: list[Path], averaged: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    mean, own = load(pair, ema=False), load(averaged, ema=False)
    images = sorted((digits / "val").glob("3/*"))[:20]
    inputs_BCHW = own.preprocess(images)
    torch.testing.assert_close(
        mean.logits(inputs_BCHW), own.logits(inputs_BCHW), rtol=1e-3, atol=1e-3
    )
    one, other = pair
    text = shown(capsys, "evaluate", one, "--with", other, "--no-ema", "--json")
    found = json.loads(text)
    whole = json.loads(shown(capsys, "evaluate", averaged, "--no-ema", "--json"))
    assert found["mean_top1"] == whole["top1"] > max(found["run_1_top1"], found["run_2_top1"])
    file = tmp_path / "mean.safetensors"
    shown(capsys, "export", one, file, "--with", other, "--no-ema", "--json")
    for name, tensor in load_file(newest(averaged) / "model.safetensors").items():
        torch.testing.assert_close(load_file(file)[name], tensor, rtol=1e-4, atol=1e-5)


def test_bad_means_of_weights_are_votes(
    averaged: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The mean of a run and of one far off is worse than the run."""
    far = moved(averaged, tmp_path / "far", 9.0)
    vote, members = (
        load([averaged, far], ema=False),
        [load(path, ema=False) for path in (averaged, far)],
    )
    assert vote.is_vote
    (image, *_) = sorted((digits / "val").glob("3/*"))
    said, *each = [dict(one.predict(image, top=10)[0]) for one in (vote, *members)]
    for name, share in said.items():
        assert share == pytest.approx(sum(one[name] for one in each) / 2, abs=1e-5)
    together = (averaged, "--with", far, "--no-ema")
    found = json.loads(shown(capsys, "evaluate", *together, "--json"))
    assert (found["run_1_top1"] > found["run_2_top1"]) and found["mean_loss"] > 0
    file = tmp_path / "x.safetensors"
    check(refused("export", averaged, file, *together[1:]), "export.of-votes")
    check(
        refused("predict", averaged, image, *together[1:], "--out", tmp_path / "x.npz"),
        "option.of-one-model",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["far"]


def test_folds_vote_on_images_that_none_has_seen(
    digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    short = ("--run.length", "2 steps", "--data.threads", 1, "--json")
    for fold in ("1/2", "2/2"):
        where = ("--data", digits / "train", "--run", tmp_path / "folds" / fold[0])
        assert run("train", "debug", *where, "--data.val_fold", fold, *short) == 0
    together = (tmp_path / "folds" / "1", "--with", tmp_path / "folds")
    check(refused("evaluate", *together), "ensemble.seen-images")
    found = json.loads(shown(capsys, "evaluate", *together, "--data", digits / "val", "--json"))
    assert found["samples"] == 364 and "probabilities" in found["mean"]
    assert {key for key in found if key.endswith("top1")} == {
        "mean_top1",
        "run_1_top1",
        "run_2_top1",
    }


def test_runs_of_other_pictures_are_refused(averaged: Path, finished: Path) -> None:
    with raises("ensemble.runs-differ", what="image size"):
        load([averaged, finished])
