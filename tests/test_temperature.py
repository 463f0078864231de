"""A temperature makes confidence the share of right guesses, in every command alike."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from scipy.optimize import minimize_scalar
from timm import create_model
from torch import nn
from torch.nn import functional as F

from tests.command_line import Capture, newest, run, shown
from tests.errors import check, raises, refused
from trainyard.classifier import load
from trainyard.config import check as check_recipe
from trainyard.run.temperature import (
    _check_linear,
    best_temperature,
    divide,
    load_temperatures,
)
from trainyard.training.label_scores import LabelScores


def scores(logits_NC: torch.Tensor) -> LabelScores:
    return LabelScores(np.ones(len(logits_NC), np.bool_), logits_NC.T.numpy())


def test_the_temperature_of_a_model_that_is_too_sure() -> None:
    """Labels are drawn from a third of the logits; one image cannot be read, one score is NaN."""
    generator = torch.Generator().manual_seed(0)
    logits_NC = 6 * torch.randn(20_000, 5, generator=generator)
    labels = torch.multinomial((logits_NC / 3).softmax(1), 1, generator=generator)[:, 0]
    logits_NC[0, 2] = float("nan")
    said = scores(logits_NC)
    said.read[1] = False
    found = best_temperature(said, labels)
    assert found == pytest.approx(3, rel=0.03)
    at = [F.cross_entropy(logits_NC[2:] / each, labels[2:]) for each in (0.98, 1, 1.02)]
    best = [F.cross_entropy(logits_NC[2:] / (found * by), labels[2:]) for by in (0.98, 1, 1.02)]
    assert best[1] < min(best[0], best[2], *at)


@pytest.mark.parametrize("samples", [20, 100, 2000])
@pytest.mark.parametrize("sharpness", [0.4, 1.0, 2.5])
def test_it_has_the_lowest_cross_entropy_of_all(samples: int, sharpness: float) -> None:
    """Also of few images, and of a model that is not sure enough; beside SciPy's minimum."""
    generator = torch.Generator().manual_seed(samples)
    logits_NC = 2 * torch.randn(samples, 4, generator=generator)
    labels = torch.multinomial(logits_NC.softmax(1), 1, generator=generator)[:, 0]
    logits_NC *= sharpness

    def loss(log_temperature: float) -> float:
        logits = logits_NC.double() / np.exp(log_temperature)
        return float(F.cross_entropy(logits, labels))

    best = minimize_scalar(loss, bounds=np.log([0.05, 20]), method="bounded").x
    found = best_temperature(scores(logits_NC), labels)
    assert found == pytest.approx(np.exp(best), rel=1e-3)
    assert loss(np.log(found)) <= min(loss(0), loss(best) + 1e-6)


@pytest.mark.parametrize("samples", [3, 20, 400])
@pytest.mark.parametrize("logit", [0.5, 3.0, 12.0])
def test_a_model_without_errors_gets_no_higher_loss(samples: int, logit: float) -> None:
    labels = torch.arange(samples) % 3
    logits_NC = logit * F.one_hot(labels, 3).float()
    found = best_temperature(scores(logits_NC), labels)
    assert 0.05 < found <= 1
    assert F.cross_entropy(logits_NC / found, labels) <= F.cross_entropy(logits_NC, labels)


def test_without_a_finite_score_there_is_none() -> None:
    logits_NC = torch.full((4, 3), torch.nan)
    assert best_temperature(scores(logits_NC), torch.arange(4) % 3) == 1


def test_a_model_without_errors_is_not_certain() -> None:
    logits_NC = 3 * F.one_hot(torch.arange(100) % 4).float()
    found = best_temperature(scores(logits_NC), torch.arange(100) % 4)
    confidence = (logits_NC / found).softmax(1).amax()
    assert 0.98 < confidence < 0.995


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "deit_tiny_distilled_patch16_224"])
def test_logits_are_divided_in_the_classifier(name: str) -> None:
    model = create_model(name, num_classes=7).eval()
    images = torch.randn(2, 3, 224 if "224" in name else 160, 224 if "224" in name else 160)
    before = model(images)
    divide(model, 2.5)
    assert torch.allclose(model(images) * 2.5, before, atol=1e-5)


@pytest.fixture
def copied(averaged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(averaged, tmp_path / "run", symlinks=True))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 3))

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(images.flatten(1)))


def test_a_classifier_that_is_not_linear_is_refused() -> None:
    """LeViT's has a batch norm, whose count of batches, an integer, cannot be divided."""
    config = check_recipe({"data": {"image_size": 2}})
    with raises("temperature.not-linear"):
        _check_linear(config, Normed(), torch.device("cpu"))


def test_evaluate_fits_and_all_commands_use_it(
    copied: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    def result(*arguments: object, command: str = "evaluate") -> Any:
        return json.loads(shown(capsys, command, copied, *arguments, "--json"))

    before, fitted = result(), result(command="calibrate")
    for prefix, weights in (("", ""), ("ema_", "ema")):
        assert fitted[f"{prefix}top1"] == before[f"{prefix}top1"]
        assert fitted[f"{prefix}loss"] < before[f"{prefix}loss"]
        assert fitted[f"{prefix}ece"] < before[f"{prefix}ece"]
        found = load_temperatures(newest(copied))[weights]
        assert found == fitted[f"{prefix}temperature"] != 1
    was = {key: fitted.pop(key) for key in [*fitted] if key.endswith("_before")}
    for key, value in was.items():
        assert value == pytest.approx(before[key.removesuffix("_before")], abs=1e-6)
    assert len(was) == 4 and result() == fitted
    lines = tmp_path / "said.csv"
    result("--out", lines)
    expected = {row.split(",")[3]: row.split(",") for row in lines.read_text().splitlines()}
    classifier = load(copied, ema=True)
    assert classifier.temperature == fitted["ema_temperature"]
    files = sorted(map(str, (digits / "val" / "3").iterdir()))
    for file, (first, *_) in zip(files, classifier.predict(files), strict=True):
        assert first.probability == pytest.approx(float(expected[file][7]), abs=2e-6)
    shown(capsys, "export", copied, tmp_path / "model.safetensors", "--ema")
    card = (tmp_path / "model.safetensors.md").read_text()
    assert f"divided by {fitted['ema_temperature']}" in card
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        measured = json.loads(file.metadata()["evaluation"])
    assert measured["top1"] == fitted["ema_top1"]
    assert "loss" not in measured and "loss" not in card.partition("## Use")[0]  # it was before
    assert result("--remove", command="calibrate") == before == result()
    assert load_temperatures(newest(copied)) == {}


def test_a_fit_is_shown_beside_what_was_before(copied: Path, capsys: Capture) -> None:
    """A second fit begins with the values that the first one has left."""
    before = json.loads(shown(capsys, "evaluate", copied, "--no-ema", "--json"))
    said = shown(capsys, "calibrate", copied, "--no-ema")
    after = json.loads(shown(capsys, "evaluate", copied, "--no-ema", "--json"))
    for key in ("loss", "ece"):
        assert f"{before[key]:.4f} before" in said and f"{after[key]:.4f} after" in said
    again = json.loads(shown(capsys, "calibrate", copied, "--no-ema", "--json"))
    assert again["loss_before"] == pytest.approx(after["loss"], abs=1e-6)


def test_what_predict_would_not_repeat_is_not_fitted(copied: Path, some: Path) -> None:
    """Three of ten classes are told apart with more confidence."""
    fit = ("calibrate", copied)
    for key, value in (("data.eval_size", 64), ("batch.precision", "bf16")):
        check(refused(*fit, f"--{key}", value), "temperature.other-keys", key=key)
    error = refused(*fit, "--data", some, "--batch.size", 7)
    check(error, "temperature.classes-left-out", location=some, num_found=3, num_classes=10)
    assert load_temperatures(newest(copied)) == {}
    assert run(*fit, "--data", some, "--all-classes", "--data.threads", 1, "--json") == 0
    assert load_temperatures(newest(copied)).keys() == {"", "ema"}


def test_other_weights_keep_theirs(copied: Path, capsys: Capture) -> None:
    said = shown(capsys, "calibrate", copied, "--ema")
    assert str(newest(copied)) in said.splitlines()[-1]
    before = load_temperatures(newest(copied))
    assert list(before) == ["ema"]
    shown(capsys, "calibrate", copied, "--no-ema")
    assert load_temperatures(newest(copied)).items() > before.items()


def test_images_that_cannot_be_read_leave_it_alone(
    copied: Path, digits: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits / "val", data)
    for path in data.glob("*/*"):
        path.write_text("no image")
    command = ("calibrate", copied, "--data", data)
    check(refused(*command), "data.none-readable", num_images=364)
    assert load_temperatures(newest(copied)) == {}


@pytest.mark.parametrize(
    ("option", "rest"), [("--temperature", ""), ("--no-temperature", " --remove")]
)
def test_the_options_of_before_name_the_command(option: str, rest: str) -> None:
    hint = f"; did you mean trainyard calibrate runs/a{rest}?"
    check(refused("evaluate", "runs/a", option), "option.unknown", option=option, hint=hint)


@pytest.mark.parametrize("text", ["{", "[]", '{"": "x"}', '{"": 1e9}', '{"": NaN}'])
def test_a_damaged_file_is_named(text: str, copied: Path) -> None:
    path = newest(copied).resolve() / "temperature.json"
    path.write_text(text)
    with raises("temperature.damaged", path=path):
        load(copied)
    for command in ("evaluate", "calibrate"):
        check(refused(command, copied), "temperature.damaged", path=path)
    assert run("calibrate", copied, "--remove", "--json") == 0
