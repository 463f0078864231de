"""How far crops of the native decoder are from Pillow's, and evaluation from torchvision's.

Pillow decodes the whole image, rounds to 8 bits after upsampling chroma, after colours, and between
the two passes of a resize; the decoder rounds once, at the end. Those roundings are what is left
between them: about half a grey level, 54 dB. Beyond that, Pillow clips colours that RGB does not
have before it resizes, so that single pixels at saturated edges differ by more.
"""

import io
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

from trainyard.data._native import core

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(core is None, reason="the extension is not built"),
]
Pixels = NDArray[np.uint8]
Box = tuple[float, float, float, float]

PHOTOGRAPHS: list[Pixels] = [
    *load_sample_images().images,
    data.astronaut(),  # type: ignore[no-untyped-call]
    data.coffee(),  # type: ignore[no-untyped-call]
]
SAMPLINGS = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111, "4:4:0": 0x121111}
QUALITIES = (10, 30, 50, 75, 90, 95, 100)
SCALES = (0.6, 0.75, 1.0, 1.3, 1.6, 2.3, 4.5)  # pixels stored for each of the target


def jpeg(pixels: Pixels, sampling: str, quality: int) -> bytes:
    options = [cv2.IMWRITE_JPEG_QUALITY, quality]
    if sampling == "grey":
        return cv2.imencode(".jpg", pixels[..., 1].copy(), options)[1].tobytes()
    options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[sampling]]
    return cv2.imencode(".jpg", pixels[..., ::-1].copy(), options)[1].tobytes()


def decode(content: bytes, box: Box, size: tuple[int, int], **options: Any) -> Pixels:
    """A box at (width, height)."""
    out, status = np.zeros((1, size[1], size[0], 3), np.uint8), np.zeros(1, np.uint8)
    zero, length = np.zeros(1, np.int64), np.array([len(content)])
    core.Decoder().decode(
        *([content], zero, zero, length, np.array([box], np.float64), np.array([False])),
        *(out, status),
        **(options | {"height": size[1], "width": size[0]}),
    )
    assert status[0] == core.OK
    pixels: Pixels = out[0]
    return pixels


def pillow(content: bytes, box: Box, size: tuple[int, int], bicubic: bool, beyond: bool) -> Pixels:
    filter = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    image = Image.open(io.BytesIO(content)).convert("RGB")
    if beyond:
        return np.asarray(image.resize(size, filter, box=box))
    left, top, right, bottom = (int(edge) for edge in box)
    return np.asarray(image.crop((left, top, right, bottom)).resize(size, filter))


def psnr(a: Pixels, b: Pixels) -> float:
    """dB; 100 for equal images."""
    error = np.square(a.astype(float) - b).mean()
    return float(100 if error == 0 else 10 * np.log10(255**2 / error))


def crops(seed: int) -> Iterator[tuple[int, Box, tuple[int, int]]]:
    """Photograph, box, and target size."""
    rng = np.random.default_rng(seed)
    for number, photograph in enumerate(PHOTOGRAPHS):
        height, width = photograph.shape[:2]
        for scale in SCALES:
            across, down = rng.integers(150, width + 1), rng.integers(150, height + 1)
            left, top = rng.integers(width - across + 1), rng.integers(height - down + 1)
            box = (float(left), float(top), float(left + across), float(top + down))
            yield number, box, (max(int(across / scale), 1), max(int(down / scale), 1))


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


@pytest.mark.parametrize(("sampling", "bicubic"), BOUNDS)
def test_crops_are_as_good_as_pillows(sampling: str, bicubic: bool) -> None:
    ratios, largest = [], 0
    for quality in QUALITIES:
        stored = [jpeg(photograph, sampling, quality) for photograph in PHOTOGRAPHS]
        for count, (number, box, size) in enumerate(crops(quality)):
            beyond = count % 2 == 1
            out = decode(stored[number], box, size, bicubic=bicubic, beyond=beyond)
            expected = pillow(stored[number], box, size, bicubic, beyond)
            away = np.abs(out.astype(int) - expected)
            assert np.median(away) <= 1
            ratios.append(psnr(out, expected))
            largest = max(largest, int(away.max()))
    median, worst, difference = BOUNDS[sampling, bicubic]
    assert np.median(ratios) >= median
    assert min(ratios) >= worst
    assert largest <= difference


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:0"])
@pytest.mark.parametrize(("short", "size"), [(256, 224), (232, 224), (224, 224), (160, 128)])
def test_evaluation_is_torchvisions(short: int, size: int, sampling: str, bicubic: bool) -> None:
    """The short side resized, then the middle cut out."""
    mode = InterpolationMode.BICUBIC if bicubic else InterpolationMode.BILINEAR
    for photograph in PHOTOGRAPHS:
        content = jpeg(photograph, sampling, 90)
        image = Image.open(io.BytesIO(content)).convert("RGB")
        resized = Resize(short, mode)(image)
        expected = np.asarray(CenterCrop(size)(resized))
        left, top = round((resized.width - size) / 2), round((resized.height - size) / 2)
        across, down = image.width / resized.width, image.height / resized.height
        box = (left * across, top * down, (left + size) * across, (top + size) * down)
        out = decode(content, box, (size, size), bicubic=bicubic, beyond=True)
        away = np.abs(out.astype(int) - expected)
        assert np.median(away) <= 1
        assert psnr(out, expected) >= 48
        assert away.max() <= (60 if bicubic else 50)
