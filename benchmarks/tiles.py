"""A small problem of real images: tiles of photographs, to be told from which photograph they are.

python -m benchmarks.tiles FOLDER

scikit-learn and scikit-image ship the photographs. FOLDER/train and FOLDER/val get a folder of
tiles for each: 32 pixels, every fourth stretch of columns for validation.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PHOTOGRAPHS = "astronaut brick camera cell chelsea coffee grass gravel hubble_deep_field retina"
_TILE = 32  # pixels
_STRIDES = {"train": 28, "val": 16}


def prepare_photographs(folder: Path) -> None:
    """Write the tiles of all photographs, each as a PNG."""
    for name, pixels in photographs():
        for split, stride in _STRIDES.items():
            rows, columns = (range(0, size - _TILE, stride) for size in pixels.shape[:2])
            for y, x in itertools.product(rows, columns):
                # No tile shows pixels of both.
                if {split_of(column) for column in (x, x + _TILE - 1)} == {split}:
                    tile = folder / split / name / f"{y}-{x}.png"
                    tile.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels[y : y + _TILE, x : x + _TILE]).save(tile)


def split_of(column: int) -> str:
    return "val" if (column // 64) % 4 == 3 else "train"


def photographs() -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Names and pixels, half of their size and no wider than 400."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    samples = load_sample_images()
    images = dict(zip(("china", "flower"), samples.images, strict=True))
    images |= {name: getattr(data, name)() for name in PHOTOGRAPHS.split()}
    for name, pixels in images.items():
        image = Image.fromarray(pixels).convert("RGB")
        image.thumbnail((400, 400))
        yield name, np.asarray(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    prepare_photographs(parser.parse_args().folder)


if __name__ == "__main__":
    main()
