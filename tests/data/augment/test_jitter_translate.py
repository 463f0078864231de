"""Colour jitter on batches against torchvision's on one Pillow image at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from skimage import data
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision.transforms import ColorJitter as TorchvisionJitter
from torchvision.transforms import functional
from torchvision.transforms.v2.functional import pad

from tests.errors import raises
from trainyard.data.augment.jitter import KINDS, ColorJitter, hue
from trainyard.data.augment.transforms import Translate
from trainyard.data.batch import Keys

Pixels = NDArray[np.uint8]
SKIMAGE: Any = data
PHOTOGRAPHS = [
    np.array(Image.fromarray(pixels).resize((90, 70)))
    for pixels in (*load_sample_images().images, SKIMAGE.chelsea(), SKIMAGE.coffee())
]
COLOURS = np.stack(np.meshgrid(*[np.arange(0, 256, 5)] * 3), -1).reshape(52, -1, 3).astype(np.uint8)
ODD = [COLOURS, np.full((1, 1, 3), 9, np.uint8), np.zeros((2, 3, 3), np.uint8)]
ADJUST = [
    functional.adjust_brightness,
    functional.adjust_contrast,
    functional.adjust_saturation,
    functional.adjust_hue,
]


def keys(count: int, visit: int = 0) -> Keys:
    return Keys(np.arange(count), np.full(count, visit), 0)


def reference(
    pixels: Pixels, order: list[int], factors: list[float], used: set[int]
) -> NDArray[np.int64]:
    image = Image.fromarray(pixels)
    for kind in order:
        if kind in used:
            image = ADJUST[kind](image, factors[kind])
    return np.array(image).astype(np.int64)


def apply(jitter: ColorJitter, images: list[Pixels], batch_keys: Keys) -> NDArray[np.int64]:
    batch_BCHW = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return jitter(batch_BCHW, batch_keys).permute(0, 2, 3, 1).numpy().astype(np.int64)


@pytest.mark.parametrize("turn", [-0.5, -0.31, -0.01, 0.0, 0.004, 0.1, 0.27, 0.5])
def test_hue_is_torchvisions(turn: float) -> None:
    for pixels in [*PHOTOGRAPHS, *ODD]:
        steps = torch.tensor([int(turn * 255), 0], dtype=torch.int16)
        found = hue(torch.from_numpy(np.stack([pixels, pixels])), steps)[0].numpy()
        expected = np.array(functional.adjust_hue(Image.fromarray(pixels), turn))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_each_kind_alone_is_torchvisions(kind: int) -> None:
    """Contrast within one grey level, the others exact."""
    strengths = [0.0] * 4
    strengths[kind] = 0.5
    jitter = ColorJitter(tuple(strengths), seed=4)
    for pixels in [*PHOTOGRAPHS, *ODD]:
        orders, factors = jitter.draw(*keys(20)[:2])
        found = apply(jitter, [pixels] * 20, keys(20))
        for row in range(20):
            expected = reference(pixels, orders[row].tolist(), factors[row].tolist(), {kind})
            difference = np.abs(found[row] - expected)
            assert difference.max() <= (1 if kind == 1 else 0)


@pytest.mark.parametrize("strengths", [(0.4, 0.4, 0.4), (0.8, 0.8, 0.8, 0.2)], ids=str)
def test_all_kinds_in_their_order_are_torchvisions(strengths: tuple[float, ...]) -> None:
    jitter = ColorJitter(strengths, seed=9)
    images = PHOTOGRAPHS * 8
    orders, factors = jitter.draw(*keys(len(images))[:2])
    found = apply(jitter, images, keys(len(images)))
    for row, pixels in enumerate(images):
        used = set(range(len(strengths)))
        expected = reference(pixels, orders[row].tolist(), factors[row].tolist(), used)
        difference = np.abs(found[row] - expected)
        # A difference of one from contrast can grow where saturation or hue follows.
        assert difference.mean() < 0.05
        assert (difference > 2).mean() < 0.01


def test_orders_and_factors_are_distributed_as_torchvisions() -> None:
    strengths, count = (0.4, 1.5, 0.2, 0.1), 20_000
    orders, factors = ColorJitter(strengths, seed=1).draw(*keys(count)[:2])
    torch.manual_seed(0)
    theirs = TorchvisionJitter(*strengths)
    ranges = (theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue)
    for kind, (low, high) in enumerate(ranges):
        assert factors[:, kind].min() >= low
        assert factors[:, kind].max() <= high
        quantiles = np.quantile(factors[:, kind], [0.1, 0.5, 0.9])
        np.testing.assert_allclose(
            quantiles, low + (high - low) * np.array([0.1, 0.5, 0.9]), atol=0.02 * (high - low)
        )
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert counts.tolist() == pytest.approx([count / 24] * 24, rel=0.2)


def test_strength_zero_changes_nothing() -> None:
    found = apply(ColorJitter((0.0, 0.0, 0.0), seed=0), PHOTOGRAPHS, keys(4))
    np.testing.assert_array_equal(found, PHOTOGRAPHS)


def test_nothing_waits_for_the_device() -> None:
    """On the meta device a result that the host asks for is an error."""
    images = torch.empty(8, 3, 16, 16, dtype=torch.uint8, device="meta")
    assert ColorJitter((0.4, 0.4, 0.4, 0.1), seed=0)(images, keys(8)).shape == images.shape


# --- translation, against torchvision's padding and cropping of one image at a time ---


def pixels(height: int, width: int, count: int) -> Tensor:
    """The same noise `count` times."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (1, 3, height, width), generator=generator, dtype=torch.uint8)
    return image.repeat(count, 1, 1, 1)


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_each_image_is_a_crop_of_the_padded_one(most: int, layout: torch.memory_format) -> None:
    """All offsets occur, about equally often, and height and width may differ."""
    places = (2 * most + 1) ** 2
    images = pixels(9, 13, count=60 * places).to(memory_format=layout)
    padded = pad(images[:1], [most], padding_mode="reflect")[0]
    crops = padded.unfold(1, 9, 1).unfold(2, 13, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
    moved = Translate(most, seed=5)(images, keys(len(images)))
    assert moved.dtype == torch.uint8
    same = (moved[:, None] == crops[None]).flatten(2).all(dim=2)
    assert same.sum(dim=1).eq(1).all()
    assert same.shape[1] == places
    assert same.sum(dim=0).min() > 30
    assert same.sum(dim=0).max() < 100


def test_a_move_beyond_the_image_is_refused() -> None:
    with raises("recipe.translate-too-large", value=8, size=8):
        Translate(8, seed=0)(pixels(8, 12, count=2), keys(2))
