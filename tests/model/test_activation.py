"""Class activation maps show where in an image a model finds a class."""

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm import create_model
from timm.layers import DropPath
from torch import nn

from tests.command_line import run
from tests.errors import raises
from trainyard.classifier import Classifier, load
from trainyard.config import check
from trainyard.course import build_course
from trainyard.model.activation import activation_maps
from trainyard.model.drop_path import drop_path_setter
from trainyard.run.build import build_run_schedule


class Brightest(nn.Module):
    """Class 1 is found in the first channel's bright pixels, class 0 in the second's."""

    def forward_features(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return images_BCHW[:, :2].relu()

    def forward_head(self, features_BCHW: torch.Tensor) -> torch.Tensor:
        return features_BCHW.mean(dim=(2, 3)).flip(1)


def test_a_map_is_where_the_class_is() -> None:
    images = torch.zeros(1, 3, 8, 8)
    images[0, 0, 2, 3], images[0, 1, 6, 1] = 4, 4
    first = activation_maps(Brightest(), images, torch.tensor([1]))[0]
    second = activation_maps(Brightest(), images, torch.tensor([0]))[0]
    assert first.nonzero().tolist() == [[2, 3]] and second.nonzero().tolist() == [[6, 1]]
    assert first[2, 3] == second[6, 1] == 1


@pytest.mark.parametrize(
    ("name", "size", "grid"),
    [
        ("test_resnet", 64, None),
        ("test_vit", 160, (10, 10)),
        ("test_vit2", 160, None),
        ("test_efficientnet", 64, None),
        ("swin_tiny_patch4_window7_224", 224, (7, 7)),
        ("convnext_atto", 64, (2, 2)),
    ],
)
def test_kinds_of_models(name: str, size: int, grid: tuple[int, int] | None) -> None:
    model = create_model(name, num_classes=5).eval().requires_grad_(False)
    maps = activation_maps(model, torch.randn(2, 3, size, size), torch.tensor([1, 4]))
    assert maps.shape[0] == 2 and maps.shape[1:] == (grid or maps.shape[1:])
    assert maps.isfinite().all() and maps.min() >= 0 and maps.max() <= 1


@pytest.mark.parametrize("size", [(224, 224), (80, 320)])
def test_a_map_has_the_shape_of_the_images(size: tuple[int, int]) -> None:
    """Images of another size were refused, or their map had the sides of the trained one."""
    model = create_model("test_vit", num_classes=5, dynamic_img_size=True).eval()
    maps = activation_maps(model, torch.randn(1, 3, *size), torch.tensor([1]))
    assert maps.shape == (1, size[0] // 16, size[1] // 16)


def test_a_model_without_features_is_refused() -> None:
    model: Any = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with raises("model.no-activation-map", name="Sequential"):
        activation_maps(model, torch.zeros(1, 3, 2, 2), torch.tensor([0]))
    with raises("model.no-activation-map", name="ResNet"):  # a map of one place
        images = torch.zeros(1, 3, 32, 32)
        activation_maps(create_model("test_resnet").eval(), images, torch.tensor([0]))


def test_overlays_lie_in_a_folder(averaged: Path, digits: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number, path in enumerate(sorted((digits / "val" / "3").iterdir())[:3]):
        shutil.copy(path, images / f"{number}.png")
    (images / "1.png").write_text("no image")
    (images / "2.png").rename(images / f"2{'名' * 83}.png")  # 254 bytes of 255
    out, table = tmp_path / "cam", tmp_path / "said.csv"
    assert run("predict", averaged, images, "--out", out, "--out", table) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "00000-0.png",
        f"00002-2{'名' * 66}.png",
    ]
    with open(table, newline="") as file:
        assert len(list(csv.DictReader(file))) == 3
    pixels = np.asarray(Image.open(out / "00000-0.png")).astype(int)
    assert max(pixels.shape[:2]) >= 224
    assert (pixels[..., 0] >= pixels[..., 1]).all()  # grey digits become redder, if anything
    before = load(averaged).predict([images / "0.png"])
    assert load(averaged).predict([images / "0.png"]) == before


def test_an_overlay_is_of_the_class_that_all_views_have(
    finished: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier, labels = load(finished), list[int]()

    def note(_: Classifier, content: bytes, label: int | None = None) -> Image.Image:
        labels.append(-1 if label is None else label)
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr(Classifier, "overlay", note)
    images = sorted((digits / "val" / "3").iterdir())
    folder = digits / "val" / "3"
    assert run("predict", finished, folder, "--out", tmp_path / "cam", "--scales", "3") == 0
    expected = classifier.predict(images, 1, scales=(3.0,))
    assert [classifier.classes[label] for label in labels] == [one[0].name for one in expected]


# --- stochastic depth whose rate changes: every block keeps its share ---


MODELS = ["test_vit", "test_resnet", "test_convnext", "resnet18", "vit_tiny_patch16_224"]


def built(name: str, rate: float) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=10, drop_path_rate=rate)
    return model


def rates(model: nn.Module) -> list[float]:
    """Of its blocks, but for those that never drop out."""
    found = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    return [rate for rate in found if rate]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6])
def test_as_if_built_with_the_rate(name: str, rate: float) -> None:
    model = built(name, 0.2)
    drop_path_setter(model, 0.2)(rate)
    assert rates(model) == pytest.approx(rates(built(name, rate)), rel=1e-6)  # timm's are float32
    assert rates(model)


def test_shares_outlive_a_rate_of_zero() -> None:
    model = built("test_vit", 0.2)
    before = rates(model)
    set_rate = drop_path_setter(model, 0.2)
    set_rate(0.0)
    assert rates(model) == []
    set_rate(0.4)
    set_rate(0.2)
    assert rates(model) == before


def test_a_forward_pass_drops_out_as_one_that_was_built_so() -> None:
    model, other = built("test_vit", 0.2), built("test_vit", 0.5)
    other.load_state_dict(model.state_dict())
    drop_path_setter(model, 0.2)(0.5)
    images_BCHW = torch.randn(8, 3, 160, 160)
    outputs = []
    for each in (model, other):
        torch.manual_seed(1)
        outputs.append(each.train()(images_BCHW))
    torch.testing.assert_close(*outputs)


def test_nothing_is_touched_while_the_rate_stays() -> None:
    model = built("test_vit", 0.2)
    set_rate = drop_path_setter(model, 0.2)
    set_rate(0.1)
    block = next(module for module in model.modules() if isinstance(module, DropPath))
    block.drop_prob = 0.7
    set_rate(0.1)
    assert block.drop_prob == 0.7


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_a_model_without_it_is_refused(rate: float) -> None:
    with raises("model.no-drop-path"):
        drop_path_setter(built("test_vit", 0.0), rate)


# --- as a recipe asks for it ---


def test_a_compiled_model_is_refused() -> None:
    keys: dict[str, dict[str, object]] = {
        "model": {"drop_path": 0.2},
        "schedule": {"drop_path_start": 0.1},
    }
    course = build_course("3 epochs", epoch_samples=100, batch=50, image_size=32)
    drops = [build_run_schedule(check(keys), course)(step).drop_path for step in range(6)]
    assert drops == pytest.approx([0.1, 0.1, 0.15, 0.15, 0.2, 0.2])
    compiled = keys | {"model": {"drop_path": 0.2, "compile": "default"}}
    with raises("recipe.drop-path-start-compiled"):
        build_run_schedule(check(compiled), course)
