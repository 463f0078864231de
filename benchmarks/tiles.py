"""Tiles of ten photographs of scikit-image, by photograph, in the form of Fashion-MNIST."""

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PHOTOGRAPHS = "astronaut brick camera cell chelsea coffee grass gravel hubble_deep_field retina"
SIDE = 28
COUNTS = (60_000, 10_000)  # training and test tiles
STRETCH = 50  # columns; every fourth stretch is for the test tiles


def write(folder: Path, counts: tuple[int, int] = COUNTS) -> None:
    """The four files of Fashion-MNIST, of tiles. Training and test tiles share no pixel."""
    folder.mkdir(parents=True, exist_ok=True)
    images, generator = photographs(), np.random.default_rng(0)
    for split, count in zip(("train", "t10k"), counts, strict=True):
        labels = generator.integers(len(images), size=count)
        tiles = [_tile(images[label], split == "t10k", generator) for label in labels]
        pixels, places = np.stack(tiles).tobytes(), labels.astype(np.uint8).tobytes()
        numbers = np.array([2051, count, SIDE, SIDE, 2049, count], ">i4")
        for name, head, body in (
            ("images-idx3", numbers[:4], pixels),
            ("labels-idx1", numbers[4:], places),
        ):
            path = folder / f"{split}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(head.tobytes() + body, 1))


def photographs() -> list[NDArray[np.uint8]]:
    """Grey, half of their size, and no wider or higher than 400 pixels."""
    from skimage import data

    found = []
    for name in PHOTOGRAPHS.split():
        image = Image.fromarray(getattr(data, name)()).convert("L")
        image.thumbnail((400, 400))
        found.append(np.asarray(image))
    return found


def _tile(
    image: NDArray[np.uint8], tests: bool, generator: np.random.Generator
) -> NDArray[np.uint8]:
    """A tile at a random place that lies in the test columns, or outside them."""
    height, width = image.shape
    while True:
        top = int(generator.integers(height - SIDE + 1))
        left = int(generator.integers(width - SIDE + 1))
        own = {column // STRETCH % 4 == 3 for column in (left, left + SIDE - 1)}
        if own == {tests}:
            return image[top : top + SIDE, left : left + SIDE]
