"""Pixels of the native decoder: the same bits by every path, those of libjpeg where nothing is
resized, and crops as good as Pillow's."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from skimage import data
from sklearn.datasets import load_sample_images
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from tests.data.native.decoder import PATHS, Pixels
from tests.data.native.decoder import decode as decode_one
from tests.tiers import tiered
from trainyard.data._native import core
from trainyard.data.decode.packed_record import record_of_pixels

pytestmark = pytest.mark.skipif(core is None, reason="the extension is not built")
PHOTOGRAPHS: list[NDArray[np.uint8]] = load_sample_images().images
SAMPLINGS = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111, "4:4:0": 0x121111}
Box = tuple[float, float, float, float]


def jpeg(pixels: Pixels, sampling: str = "4:4:4", quality: int = 90) -> bytes:
    shown = pixels if pixels.ndim == 2 else pixels[..., ::-1]
    options = [cv2.IMWRITE_JPEG_QUALITY, quality]
    if sampling == "grey" and pixels.ndim == 3:
        shown = pixels[..., 1]
    if sampling != "grey":
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[sampling]]
    return cv2.imencode(".jpg", np.ascontiguousarray(shown), options)[1].tobytes()


def decode(content: bytes, box: Box, size: tuple[int, int], path: str, **options: Any) -> Pixels:
    """A box at (height, width) by one path, as height x width x 3."""
    out, status = decode_one(content, box, size, path, **options)
    assert status == core.OK
    return out


def pillow(content: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def flatter(pixels: Pixels, strength: int) -> Pixels:
    """So that blocks have few coefficients."""
    return (pixels // strength * strength + strength // 2).astype(np.uint8)


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="vectors are off here, too")
@pytest.mark.parametrize(("capability", "paths"), [("default", PATHS[-1:]), ("avx2", PATHS)])
def test_what_switches_torchs_vectors_off_does_so_here(
    capability: str, paths: tuple[str, ...]
) -> None:
    """How a machine of another make is tried out: each path has the same bits, see below."""
    asked = "from trainyard.data._native import core; print((*core.paths, core.Decoder().path))"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    said = subprocess.check_output([sys.executable, "-c", asked], env=environment, text=True)
    assert said == f"{(*paths, paths[0])}\n"


# --- the inverse cosine transform ---


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("quality", [1, 5, 10, 30, 50, 75, 90, 95, 100])
@pytest.mark.parametrize("kind", ["photograph", "flat", "noise", "black and white"])
def test_samples_are_libjpegs_bit_for_bit(kind: str, quality: int, path: str) -> None:
    rng = np.random.default_rng(quality)
    grey = np.asarray(Image.fromarray(PHOTOGRAPHS[0]).convert("L"))[:248, :311]
    pixels = {
        "photograph": grey,
        "flat": flatter(grey, 64),
        "noise": rng.integers(0, 256, grey.shape, np.uint8),
        "black and white": (rng.random(grey.shape) < 0.5).astype(np.uint8) * 255,
    }[kind]
    content = jpeg(pixels, "grey", quality)
    height, width = pixels.shape
    out = decode(content, (0, 0, width, height), (height, width), path)
    np.testing.assert_array_equal(out, pillow(content))


# --- where nothing is resized ---


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "size", [(427, 640), (33, 17), (8, 8), (300, 7), (5, 4), (4, 3), (2, 2), (1, 1)]
)
def test_own_size_is_within_a_grey_level_of_pillow(
    size: tuple[int, int], sampling: str, bicubic: bool
) -> None:
    for photograph in PHOTOGRAPHS:
        content = jpeg(photograph[: size[0], : size[1]], sampling)
        height, width = size
        out = decode(content, (0, 0, width, height), size, PATHS[0], bicubic=bicubic)
        away = np.abs(out.astype(int) - pillow(content))
        assert away.max() <= (1 if sampling == "4:4:4" else 2)
        assert np.median(away) == 0


# --- every path, every target ---


def random_boxes(rng: np.random.Generator, width: int, height: int) -> Box:
    left, right = np.sort(rng.uniform(0, width, 2))
    top, bottom = np.sort(rng.uniform(0, height, 2))
    if rng.random() < 0.5:
        left, top, right, bottom = np.floor(left), np.floor(top), np.ceil(right), np.ceil(bottom)
    return (float(left), float(top), float(right), float(bottom))


@pytest.mark.parametrize("stored", [*SAMPLINGS, "grey", "pixels"])
def test_every_path_gives_the_same_bits(stored: str) -> None:
    """Any box of any image at any size, by any filter."""
    rng = np.random.default_rng(len(stored))
    for _ in range(60):
        height, width = (int(side) for side in rng.integers(1, 400, 2))
        pixels = np.ascontiguousarray(PHOTOGRAPHS[0][:height, :width])
        content = record_of_pixels(pixels) if stored == "pixels" else jpeg(pixels, stored, 85)
        box = random_boxes(rng, width, height)
        size = (int(rng.integers(1, 300)), int(rng.integers(1, 300)))
        options = {name: bool(rng.random() < 0.5) for name in ("flip", "beyond", "bicubic")}
        first, *others = (decode(content, box, size, path, **options) for path in PATHS)
        for out in others:
            np.testing.assert_array_equal(out, first)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", [1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 100])
def test_targets_of_any_width(width: int, path: str) -> None:
    pixels = PHOTOGRAPHS[1][:200, :300]
    content = jpeg(pixels, "4:2:0", 95)
    whole = Image.fromarray(pillow(content))
    out = decode(content, (0, 0, 300, 200), (9, width), path)
    expected = np.asarray(whole.resize((width, 9), Image.Resampling.BILINEAR))
    away = np.abs(out.astype(int) - expected)
    assert away.max() <= 4  # Pillow clips colours before it resizes
    assert away.mean() < 0.3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("stored", [64, 333, 3000])
def test_flat_images_stay_flat(stored: int, bicubic: bool, path: str) -> None:
    """Weights add up to one, however many there are."""
    for value in (0, 1, 127, 128, 254, 255):
        content = record_of_pixels(np.full((40, stored, 3), value, np.uint8))
        for width in (1, 3, 32, 100, 224):
            out = decode(
                content, (0.3, 0.6, stored - 0.4, 39.7), (21, width), path, bicubic=bicubic
            )
            assert (out == value).all()


# --- luma ---


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sampling", [*SAMPLINGS, "grey"])
def test_one_channel_is_luma(sampling: str, path: str) -> None:
    """That of libjpeg bit for bit at its own size; of a packed record too. A grey JPEG of the same
    luma gives the same bits in any box of any size, by any filter."""
    rng = np.random.default_rng(1)
    for height, width in [(427, 640), (33, 17), (300, 7), (5, 4), (1, 1)]:
        content = jpeg(np.ascontiguousarray(PHOTOGRAPHS[0][:height, :width]), sampling, 100)
        image = Image.open(io.BytesIO(content))
        image.draft("L", None)
        luma = np.asarray(image)
        record = core.Decoder(path).pack(content)
        assert record is not None
        for stored in (content, record):
            out = decode(stored, (0, 0, width, height), (height, width), path, channels=1)
            np.testing.assert_array_equal(out[..., 0], luma)
        colours = record_of_pixels(np.repeat(luma[..., None], 3, axis=2))
        for _ in range(8):
            box, size = random_boxes(rng, width, height), (int(rng.integers(1, 90)), 45)
            options = {name: bool(rng.random() < 0.5) for name in ("flip", "beyond", "bicubic")}
            out = decode(record, box, size, path, channels=1, **options)
            equal = decode(colours, box, size, path, **options)
            np.testing.assert_array_equal(out[..., 0], equal[..., 0])


def test_luma_of_a_record_of_colours_is_left_to_pillow() -> None:
    content = record_of_pixels(PHOTOGRAPHS[0])
    _, status = decode_one(content, (0, 0, 9, 9), (9, 9), PATHS[0], channels=1)
    assert status == core.NOT_OURS
    with pytest.raises(ValueError, match="channels: 1 or 3"):
        decode_one(content, (0, 0, 9, 9), (9, 9), PATHS[0], channels=2)


@pytest.mark.parametrize("path", PATHS)
def test_a_grey_record_is_that_of_equal_colours(path: str) -> None:
    rng = np.random.default_rng(2)
    grey = np.ascontiguousarray(PHOTOGRAPHS[0][:97, :131, 1])
    record, colours = (record_of_pixels(x) for x in (grey, np.stack([grey] * 3, axis=2)))
    whole = decode(record, (0, 0, 131, 97), (97, 131), path, channels=1)
    np.testing.assert_array_equal(whole[..., 0], grey)
    for _ in range(20):
        box, size = random_boxes(rng, 131, 97), (int(rng.integers(1, 90)), 45)
        options = {name: bool(rng.random() < 0.5) for name in ("flip", "beyond", "bicubic")}
        expected = decode(colours, box, size, path, **options)
        np.testing.assert_array_equal(decode(record, box, size, path, **options), expected)
        luma = decode(record, box, size, path, channels=1, **options)
        np.testing.assert_array_equal(luma, expected[..., :1])


@pytest.mark.parametrize("path", PATHS)
def test_a_flip_is_a_mirror(path: str) -> None:
    for sampling in ("4:4:4", "4:2:0"):
        content = jpeg(PHOTOGRAPHS[0], sampling)
        box, size = (31.0, 17.0, 331.0, 317.0), (224, 224)
        plain, flipped = (decode(content, box, size, path, flip=flip) for flip in (False, True))
        away = np.abs(plain.astype(int) - flipped[:, ::-1])
        assert away.max() <= 1  # what is rounded adds up from the other side
        assert (away > 0).mean() < 0.02


# --- how far crops are from Pillow's, and evaluation from torchvision's ---

# Pillow rounds to 8 bits after upsampling chroma, after colours, and between the two passes of a
# resize; the decoder rounds once. Pillow also clips colours that RGB does not have before it
# resizes, so single pixels at saturated edges differ by more.
MORE: list[Pixels] = [
    *PHOTOGRAPHS,
    data.astronaut(),  # type: ignore[no-untyped-call]
    data.coffee(),  # type: ignore[no-untyped-call]
]
QUALITIES = (10, 30, 50, 75, 90, 95, 100)
SCALES = (0.6, 0.75, 1.0, 1.3, 1.6, 2.3, 4.5)  # pixels stored for each of the target


def resized(content: bytes, box: Box, size: tuple[int, int], bicubic: bool, beyond: bool) -> Pixels:
    """By Pillow, to (height, width)."""
    how = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    image = Image.open(io.BytesIO(content)).convert("RGB")
    if beyond:
        return np.asarray(image.resize(size[::-1], how, box=box))
    left, top, right, bottom = (int(edge) for edge in box)
    return np.asarray(image.crop((left, top, right, bottom)).resize(size[::-1], how))


def psnr(a: Pixels, b: Pixels) -> float:
    """dB; 100 for equal images."""
    error = np.square(a.astype(float) - b).mean()
    return float(100 if error == 0 else 10 * np.log10(255**2 / error))


def crops(seed: int) -> Iterator[tuple[int, Box, tuple[int, int]]]:
    """Photograph, box, and target size."""
    rng = np.random.default_rng(seed)
    for number, photograph in enumerate(MORE):
        height, width = photograph.shape[:2]
        for scale in SCALES:
            across, down = rng.integers(150, width + 1), rng.integers(150, height + 1)
            left, top = rng.integers(width - across + 1), rng.integers(height - down + 1)
            box = (float(left), float(top), float(left + across), float(top + down))
            yield number, box, (max(int(down / scale), 1), max(int(across / scale), 1))


# Sampling, cubic: at least this PSNR in dB in the median and at worst, at most this difference.
BOUNDS = {
    ("grey", False): (57.0, 54.0, 1),
    ("grey", True): (56.5, 54.0, 20),
    ("4:4:4", False): (53.5, 44.5, 50),
    ("4:4:4", True): (53.3, 44.3, 60),
    ("4:2:2", False): (52.2, 44.0, 50),
    ("4:2:2", True): (52.0, 44.0, 60),
    ("4:2:0", False): (51.7, 43.5, 50),
    ("4:2:0", True): (51.5, 43.5, 60),
    ("4:4:0", False): (52.5, 44.2, 50),
    ("4:4:0", True): (52.2, 44.0, 60),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "bicubic"), tiered(BOUNDS, night=BOUNDS.keys() - {("4:2:0", False)})
)
def test_crops_are_as_good_as_pillows(sampling: str, bicubic: bool) -> None:
    ratios, largest = [], 0
    for quality in QUALITIES:
        stored = [jpeg(photograph, sampling, quality) for photograph in MORE]
        for count, (number, box, size) in enumerate(crops(quality)):
            beyond = count % 2 == 1
            out = decode(stored[number], box, size, PATHS[0], bicubic=bicubic, beyond=beyond)
            expected = resized(stored[number], box, size, bicubic, beyond)
            away = np.abs(out.astype(int) - expected)
            assert np.median(away) <= 1
            ratios.append(psnr(out, expected))
            largest = max(largest, int(away.max()))
    median, worst, difference = BOUNDS[sampling, bicubic]
    assert np.median(ratios) >= median
    assert min(ratios) >= worst
    assert largest <= difference


@pytest.mark.night
@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:0"])
@pytest.mark.parametrize(("short", "size"), [(256, 224), (232, 224), (224, 224), (160, 128)])
def test_evaluation_is_torchvisions(short: int, size: int, sampling: str, bicubic: bool) -> None:
    """The short side resized, then the middle cut out."""
    mode = InterpolationMode.BICUBIC if bicubic else InterpolationMode.BILINEAR
    for photograph in MORE:
        content = jpeg(photograph, sampling, 90)
        image = Image.open(io.BytesIO(content)).convert("RGB")
        whole = Resize(short, mode)(image)
        expected = np.asarray(CenterCrop(size)(whole))
        left, top = round((whole.width - size) / 2), round((whole.height - size) / 2)
        across, down = image.width / whole.width, image.height / whole.height
        box = (left * across, top * down, (left + size) * across, (top + size) * down)
        out = decode(content, box, (size, size), PATHS[0], bicubic=bicubic, beyond=True)
        away = np.abs(out.astype(int) - expected)
        assert np.median(away) <= 1
        assert psnr(out, expected) >= 48
        assert away.max() <= (60 if bicubic else 50)
