"""Boxes and flips against plain references, one image at a time, and against torchvision."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform
from torchvision.transforms import v2

from tests.errors import raises
from tests.images import encode
from trainyard.config import check
from trainyard.data._native import core, own_decoder
from trainyard.data.decode.crops import (
    CentralCrop,
    Crops,
    FittedCrop,
    Interpolation,
    RandomCropParameters,
    RandomResizedCrop,
)
from trainyard.data.decode.decode import decode_batch, native_pixels
from trainyard.data.rng import fold_in, uniforms
from trainyard.data.storage.encoded import in_memory
from trainyard.image_size import ImageSize

IMAGENET = RandomResizedCrop(seed=7, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5)
WHOLE = RandomResizedCrop(seed=7, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0)  # seldom fits
ODD_SIZES = [(1, 1), (1, 500), (500, 1), (3, 4000), (4000, 3), (2, 3), (333, 500), (5000, 4999)]

Ids = NDArray[np.int64]


def crop(
    random_crop: RandomResizedCrop,
    sizes: list[tuple[int, int]],
    ids: Ids | None = None,
    epoch: int = 0,
) -> Crops:
    ids = np.arange(len(sizes)) if ids is None else ids
    return random_crop.draw(ids, np.full_like(ids, epoch))(np.array(sizes))


# --- random crops ---


def reference_box(
    config: RandomResizedCrop, size: tuple[int, int], random: list[float]
) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params, with its random numbers handed in."""
    width, height = size
    at_left, at_top, _, *tries = random
    for area_random, ratio_random in zip(tries[:10], tries[10:], strict=True):
        low, high = config.scale
        area = width * height * (low + (high - low) * area_random)
        low, high = math.log(config.ratio[0]), math.log(config.ratio[1])
        ratio = math.exp(low + (high - low) * ratio_random)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(at_left * (width - w + 1)), int(at_top * (height - h + 1))
            return left, top, left + w, top + h
    w, h = width, height
    if width / height < config.ratio[0]:
        h = round(width / config.ratio[0])
    elif width / height > config.ratio[1]:
        w = round(height * config.ratio[1])
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


@pytest.mark.parametrize("config", [IMAGENET, WHOLE], ids=["imagenet", "mostly fall-back"])
def test_boxes_are_those_of_the_plain_algorithm(config: RandomResizedCrop) -> None:
    generator = np.random.default_rng(0)
    sizes = ODD_SIZES * 40 + [
        (int(w), int(h)) for w, h in generator.integers(1, 1000, size=(1000, 2))
    ]
    ids, epochs = generator.integers(0, 10**9, size=(2, len(sizes)))
    random = uniforms(fold_in(config.seed, np.ones_like(ids), epochs, ids), 23).tolist()
    expected = [reference_box(config, *pair) for pair in zip(sizes, random, strict=True)]
    draws = config.draw(ids, epochs)
    crops = draws(np.array(sizes))
    assert (crops.boxes == crops.boxes.round()).all()
    assert (crops.boxes[:, :2] >= 0).all()
    assert (crops.boxes[:, 2:] <= sizes).all()
    assert (crops.boxes[:, 2:] - crops.boxes[:, :2] >= 1).all()
    np.testing.assert_array_equal(crops.boxes, expected)
    np.testing.assert_array_equal(crops.flips, [row[2] < config.flip for row in random])
    some = np.array([5, 3, 700])
    np.testing.assert_array_equal(draws[some](np.array(sizes)[some]).boxes, crops.boxes[some])


@pytest.mark.skipif(core is None, reason="the extension is not built")
@pytest.mark.parametrize(
    "config",
    [IMAGENET, WHOLE, CentralCrop(24, 0.875), CentralCrop((30, 17), 0.9), CentralCrop(24, 1.0)],
    ids=["imagenet", "mostly fall-back", "square", "rectangle", "whole"],
)
def test_the_decoder_makes_the_same_boxes(config: RandomResizedCrop | CentralCrop) -> None:
    generator = np.random.default_rng(0)
    sizes = ODD_SIZES + [(int(w), int(h)) for w, h in generator.integers(1, 300, size=(200, 2))]
    contents = [encode(Image.new("L", size), "JPEG", quality=10) for size in sizes]
    ids, epochs = generator.integers(0, 10**9, size=(2, len(sizes)))
    draws = config.draw(ids, epochs)
    assert isinstance(draws, RandomCropParameters | CentralCrop)
    crops, rule = draws.rule(len(sizes))
    out, status = np.empty((len(sizes), 8, 8, 3), np.uint8), np.zeros(len(sizes), np.uint8)
    native_pixels(core.Decoder(), in_memory(contents), crops, out, status=status, rule=rule)
    assert not status.any()
    expected = draws(np.array(sizes))
    np.testing.assert_array_equal(crops.boxes, expected.boxes)
    np.testing.assert_array_equal(crops.flips, expected.flips)
    assert crops.resizes_first == expected.resizes_first


def test_distribution_is_torchvisions() -> None:
    """Quantiles of area, ratio and place agree on one image size over 20,000 draws of each."""
    width, height, draws = 500, 375, 20_000
    boxes = crop(IMAGENET, [(width, height)] * draws).boxes
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = v2.RandomResizedCrop(1, scale=IMAGENET.scale, ratio=IMAGENET.ratio)
    drawn = [theirs.make_params([image]) for _ in range(draws)]
    tops, lefts, heights, widths = (
        np.array([params[key] for params in drawn], float)
        for key in ("top", "left", "height", "width")
    )
    ours_width, ours_height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    quantiles = np.linspace(0.05, 0.95, 19)
    for mine, other in (
        (ours_width * ours_height / (width * height), widths * heights / (width * height)),
        (ours_width / ours_height, widths / heights),
        (boxes[:, 0] / (width - ours_width + 1), lefts / (width - widths + 1)),
        (boxes[:, 1] / (height - ours_height + 1), tops / (height - heights + 1)),
    ):
        # The standard error of a quantile of 20,000 uniform draws is 0.0035.
        np.testing.assert_allclose(
            np.quantile(mine, quantiles), np.quantile(other, quantiles), atol=0.02
        )
        assert mine.mean() == pytest.approx(other.mean(), abs=0.01)


def test_alternating_flips() -> None:
    """Every image in every other epoch; half of them in the first, other ones for another seed."""
    crops = RandomResizedCrop(3, (0.5, 1.0), (0.8, 1.2), 0.5, alternates=True)
    ids, sizes = np.arange(10_000), np.full((10_000, 2), 64)
    first, *later = (crops.draw(ids, np.full_like(ids, n))(sizes).flips for n in range(4))
    assert first.mean() == pytest.approx(0.5, abs=0.02)
    for epoch, flips in enumerate(later, 1):
        np.testing.assert_array_equal(flips, ~first if epoch % 2 else first)
    other = replace(crops, seed=4).draw(ids, np.zeros_like(ids))(sizes)
    assert (other.flips == first).mean() == pytest.approx(0.5, abs=0.02)
    random = replace(crops, alternates=False).draw(ids, ids % 7)(sizes)
    np.testing.assert_array_equal(crops.draw(ids, ids % 7)(sizes).boxes, random.boxes)


# --- central crops ---

PHOTOGRAPH = Image.fromarray(load_sample_images().images[0])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "target", [(224, 224), (65, 65), (64, 160), (160, 64), (96, 97), (224, 225)], ids=str
)
@pytest.mark.parametrize("crop_pct", [0.875, 0.95, 1.0])
@pytest.mark.parametrize("size", [(640, 427), (427, 640), (160, 64), (33, 470)], ids=str)
def test_central_crops_are_those_of_timm(
    size: tuple[int, int], target: tuple[int, int], crop_pct: float, interpolation: Interpolation
) -> None:
    """For squares they are torchvision's: resized, then cut out of the middle."""
    image = PHOTOGRAPH.resize(size)
    theirs = create_transform(
        (3, *target), crop_pct=crop_pct, interpolation=interpolation, normalize=False
    )
    ours = np.empty((1, *target, 3), np.uint8)
    content = encode(image, "PNG", compress_level=0)
    assert decode_batch([content], CentralCrop(target, crop_pct), ours, interpolation) == {}
    pixels = np.asarray(theirs(image)).transpose(1, 2, 0)
    # Pillow rounds to grey levels between its two passes, whose order may differ with the box.
    difference = np.abs(ours[0].astype(int) - pixels)
    assert difference.max() <= 2
    assert (difference > 1).mean() < 1e-3


PAD = (124, 116, 104)


@pytest.mark.parametrize("target", [(96, 96), (64, 160), (33, 32)], ids=str)
@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
@pytest.mark.parametrize("mode", ["squash", "border"])
@pytest.mark.parametrize("size", [(640, 427), (100, 300), (48, 20), (160, 64)], ids=str)
def test_whole_images_are_those_of_timm(
    size: tuple[int, int], mode: str, crop_pct: float, target: tuple[int, int]
) -> None:
    """timm truncates the sides of an image that it pads, and ours are rounded."""
    image = PHOTOGRAPH.resize(size)
    theirs = create_transform(
        (3, *target), crop_pct=crop_pct, crop_mode=mode, normalize=False
    ).transforms
    ours = np.empty((1, *target, 3), np.uint8)
    crop = FittedCrop(target, crop_pct, PAD if mode == "border" else None)
    content = encode(image, "PNG", compress_level=0)
    assert decode_batch([content], crop, ours, "bilinear", decoder=own_decoder()) == {}
    for transform in theirs:
        image = transform(image)
    difference = np.abs(ours[0].astype(int) - np.asarray(image).transpose(1, 2, 0))
    if mode == "squash":
        assert difference.max() <= 2
    assert np.median(difference) <= 1
    assert difference.mean() < (0.5 if mode == "squash" else 4)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (3, 4000), (333, 500)], ids=str)
@pytest.mark.parametrize("pad", [None, PAD])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_training_at_full_scale_sees_the_whole_image(
    size: tuple[int, int], pad: tuple[int, ...] | None, kind: str
) -> None:
    """Pixel for pixel what an evaluation sees, flipped or not; smaller crops are valid, too."""
    content = encode(PHOTOGRAPH.resize(size), kind)
    whole = RandomResizedCrop(0, (1, 1), (3 / 4, 4 / 3), 0.5, fit="squash", pad=pad)
    seen, expected = np.empty((8, 24, 40, 3), np.uint8), np.empty((1, 24, 40, 3), np.uint8)
    draws = whole.draw(np.arange(8), np.zeros(8, np.int64))
    decoder = own_decoder()
    assert decode_batch([content] * 8, draws, seen, "bilinear", decoder=decoder) == {}
    crop = FittedCrop((24, 40), 1, pad)
    assert decode_batch([content], crop, expected, "bilinear", decoder=decoder) == {}
    flips = draws(np.array([size] * 8)).flips
    assert 0 < flips.sum() < 8
    for image, flip in zip(seen, flips, strict=True):
        np.testing.assert_array_equal(image[:, ::-1] if flip else image, expected[0])
    part = replace(whole, scale=(0.08, 1.0)).draw(np.arange(8), np.zeros(8, np.int64))
    assert decode_batch([content] * 8, part, seen, "bilinear", decoder=decoder) == {}


def test_relative_crops_have_the_shares_and_shapes_of_a_square() -> None:
    squashed = replace(IMAGENET, fit="squash")
    sizes = [(1000, 1000), (1000, 500), (250, 1000)]
    of_square, *others = (crop(squashed, [size] * 99).boxes / np.tile(size, 2) for size in sizes)
    for boxes in others:
        np.testing.assert_allclose(boxes, of_square, rtol=1e-12)
    np.testing.assert_array_equal(of_square * 1000, crop(IMAGENET, [(1000, 1000)] * 99).boxes)


def test_padding_is_the_mean_and_bad_images_are_black() -> None:
    contents = [encode(Image.new("RGB", (10, 40), "white"), kind) for kind in ("PNG", "JPEG")]
    out = np.empty((3, 20, 20, 3), np.uint8)
    bad = decode_batch(
        [contents[0], b"\xff\xd8no", contents[1]],
        FittedCrop(20, 1, PAD),
        out,
        "bicubic",
        decoder=own_decoder(),
    )
    assert [*bad] == [1]
    assert not out[1].any()
    for image in out[::2]:
        assert (image[:, 7:12] == 255).all()
        assert (image[:, :7] == PAD).all()
        assert (image[:, 12:] == PAD).all()


@pytest.mark.parametrize("target", [224, (64, 160), (160, 64)], ids=str)
@pytest.mark.parametrize("crop_pct", [0.875, 1.0])
@pytest.mark.parametrize("size", [*ODD_SIZES, (640, 427)], ids=str)
def test_central_crops_lie_inside(
    size: tuple[int, int], crop_pct: float, target: ImageSize
) -> None:
    """To the bit: boxes over an edge by a rounding error would be left to the libraries."""
    left, top, right, bottom = CentralCrop(target, crop_pct)(np.array([size])).boxes[0]
    assert 0 <= left < right <= size[0]
    assert 0 <= top < bottom <= size[1]


# --- recipe keys ---


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"color_jitter": [0.4]}, "color_jitter"),
        ({"color_jitter": [0.4, 0.4, 0.4, 0.6]}, "color_jitter"),
        ({"randaugment": "rand-m9", "color_jitter": [0.4, 0.4, 0.4]}, "color_jitter"),
        ({"mixup": -1.0}, "mixup"),
        ({"flip_mode": "alternating", "flip": 0.3}, "flip_mode"),
        ({"flip": 0.3, "flip_mode": "alternating"}, "flip_mode"),
        ({"translate": -1}, "translate"),
        ({"mix_mode": "half"}, "mix_mode"),
    ],
    ids=str,
)
def test_wrong_keys_are_refused(keys: dict[str, Any], key: str) -> None:
    with raises("recipe.invalid-value", key=f"augment.{key}"):
        check({"augment": keys})


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"color_jitter": [0.4, 0.4, 0.4]},
        {"color_jitter": [0.4, 0.4, 0.4, 0.5]},
        {"randaugment": "3a", "color_jitter": [0.3, 0.3, 0.3]},
        {"randaugment": "rand-m9", "color_jitter": []},
    ],
    ids=str,
)
def test_keys_that_fit_together_can_be_written_out_and_read(keys: dict[str, Any]) -> None:
    config = check({"augment": keys})
    assert check(config.model_dump(mode="json", exclude_none=True)) == config


@pytest.mark.parametrize(
    ("keys", "mixes"), [({}, False), ({"mixup": 0.2}, True), ({"cutmix": 1.0}, True)]
)
def test_a_recipe_mixes_where_either_alpha_is_above_zero(keys: dict[str, Any], mixes: bool) -> None:
    assert check({"augment": keys}).augment.mixes == mixes
