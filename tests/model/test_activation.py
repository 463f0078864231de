"""Class activation maps show where in an image a model finds a class."""

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm import create_model
from torch import nn

from tests.command_line import run
from tests.errors import raises
from trainyard.classifier import Classifier, load
from trainyard.model.activation import activation_maps


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
