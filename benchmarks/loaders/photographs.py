"""JPEGs like ImageNet's, made of the photographs that scikit-image and scikit-learn bring along.

Each is a random part of one of them, zoomed, mirrored, with other colours, sharpened and a little
noisy: about 460 x 388 pixels and 110 kB in the mean, as ImageNet's are. Quality is 88 to 98; half
have chroma at full resolution, half at half; half have Huffman tables of their own. The same
seed gives the same files.
"""

import io
import random
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import skimage
import sklearn.datasets
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

CLASSES = 10
_SKIMAGE = Path(skimage.__file__).parent / "data"
_SKLEARN = Path(sklearn.datasets.__file__).parent / "images"
_SOURCES = {  # and how often each is drawn
    _SKIMAGE / "astronaut.png": 1.0,
    _SKIMAGE / "chelsea.png": 1.0,
    _SKIMAGE / "coffee.png": 1.2,
    _SKIMAGE / "motorcycle_left.png": 1.2,
    _SKIMAGE / "motorcycle_right.png": 1.2,
    _SKIMAGE / "rocket.jpg": 1.0,
    _SKIMAGE / "hubble_deep_field.jpg": 0.5,
    _SKIMAGE / "retina.jpg": 0.3,
    _SKLEARN / "china.jpg": 2.0,
    _SKLEARN / "flower.jpg": 1.0,
}
_SHAPES = [(500, 375), (375, 500), (500, 333), (333, 500)]  # ImageNet's usual ones
_SHAPE_WEIGHTS = (0.55, 0.12, 0.10, 0.05, 0.165, 0.015)  # of these, of small and of large ones


class About(NamedTuple):
    """One photograph."""

    name: str
    width: int
    height: int
    size: int  # bytes
    quality: int
    is_444: bool


def make_photographs(folder: Path, count: int, *, workers: int = 2) -> list[About]:
    """Write CLASS/NUMBER.jpg; which are there already stay."""
    with ProcessPoolExecutor(workers) as pool:
        numbers = range(count)
        return list(pool.map(_make, [folder] * count, numbers, chunksize=16))


def _make(folder: Path, number: int) -> About:
    rng = random.Random(number)
    path = folder / f"c{number % CLASSES:02d}" / f"{number:05d}.jpg"
    quality = rng.choice([88, 90, 92, 94, 95, 95, 96, 96, 97, 98, 98])
    is_444, optimize = rng.random() < 0.5, rng.random() < 0.5
    width, height = _size(rng)
    if not path.exists():
        image = _photograph(rng, width, height)
        out = io.BytesIO()
        options: dict[str, Any] = {"subsampling": 0 if is_444 else 2, "optimize": optimize}
        image.save(out, "JPEG", quality=quality, **options)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(out.getvalue())
    return About(f"{path.parent.name}/{path.name}", width, height, path.stat().st_size, quality,
                 is_444)  # fmt: skip


def _size(rng: random.Random) -> tuple[int, int]:
    kind = rng.choices(range(6), _SHAPE_WEIGHTS)[0]
    if kind < len(_SHAPES):
        return _SHAPES[kind]
    if kind == len(_SHAPES):
        width = rng.randint(160, 500)
        return width, int(width * rng.choice([0.66, 0.75, 0.8, 1, 1.25, 1.33]))
    width = rng.randint(640, 1280)
    return width, int(width * 0.75)


def _photograph(rng: random.Random, width: int, height: int) -> Image.Image:
    source = _source(rng.choices(range(len(_SOURCES)), list(_SOURCES.values()))[0])
    zoom = rng.uniform(0.5, 1.3)  # pixels made of one of the source's
    shrink = min(1.0, source.width * zoom / width, source.height * zoom / height) / zoom
    wide, high = width * shrink, height * shrink
    left = rng.uniform(0, max(0.0, source.width - wide))
    top = rng.uniform(0, max(0.0, source.height - high))
    box = (left, top, min(left + wide, source.width), min(top + high, source.height))
    image = source.resize((width, height), Image.Resampling.LANCZOS, box=box)
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    image = ImageEnhance.Brightness(image).enhance(rng.uniform(0.75, 1.25))
    image = ImageEnhance.Color(image).enhance(rng.uniform(0.6, 1.4))
    image = ImageEnhance.Contrast(image).enhance(rng.uniform(0.85, 1.25))
    image = image.filter(ImageFilter.UnsharpMask(1.0, rng.randint(20, 110), 1))
    noise = np.random.default_rng(rng.getrandbits(32))
    pixels = np.asarray(image, np.float64)
    pixels = pixels + noise.normal(0, rng.uniform(0.5, 4.0), pixels.shape)
    return Image.fromarray(np.clip(pixels + 0.5, 0, 255).astype(np.uint8))


@cache
def _source(number: int) -> Image.Image:
    return Image.open(list(_SOURCES)[number]).convert("RGB")
