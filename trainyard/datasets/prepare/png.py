"""Arrays of pixels as an indexed file of PNGs, from which they are packed."""

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainyard.data.formats.scan import FileRows, Scan
from trainyard.data.index.build import Progress, index_scan
from trainyard.data.index.table import Index
from trainyard.data.storage.location import find_place
from trainyard.datasets.prepare.preparation import Preparation
from trainyard.files import atomic_write


class LabelledPixels(NamedTuple):
    """The images of a split and their labels."""

    pixels: NDArray[np.uint8]  # (N, H, W, 3) or (N, H, W)
    labels: NDArray[np.uint8]  # (N,)
    classes: list[str]


def index_as_png(
    preparation: Preparation, split: str, images: LabelledPixels, archive: Path
) -> Index:
    """Encodes images as PNGs, and indexes them.

    The PNGs lie end to end in one file. It has the archive's time, so a restart makes the same one.
    """
    path = preparation.folder / f"{split}.png"
    with preparation.counter(f"encoding {split} as PNG", len(images.labels)) as progress:
        sizes = _write_images(path, images.pixels, progress)
    stat = archive.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    offsets = [0, *np.cumsum(sizes)[:-1].tolist()]
    rows = iter([FileRows(path.name, offsets, sizes, images.labels.tolist())])
    place = find_place(str(path))
    scan = Scan(place, "png", images.classes, place.names, rows)
    return index_scan(scan, path.with_suffix(".index"))


def _write_images(path: Path, pixels: NDArray[np.uint8], progress: Progress) -> list[int]:
    """Writes images end to end into one file; returns their sizes in bytes."""
    sizes = []
    with ThreadPoolExecutor() as pool, atomic_write(path) as file:
        for image in pool.map(_png, pixels):
            file.write(image)
            sizes.append(len(image))
            progress(len(sizes))
    return sizes


def _png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
