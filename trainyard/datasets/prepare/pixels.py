"""Arrays of pixels as an indexed file of packed records, from which shards are written."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.decode.packed_record import record_of_pixels
from trainyard.data.formats.scan import FileRows, Scan
from trainyard.data.index.build import index_scan
from trainyard.data.storage.location import find_place
from trainyard.datasets.pack.pack import Selection
from trainyard.datasets.prepare.preparation import Preparation
from trainyard.files import atomic_write


class LabelledPixels(NamedTuple):
    """The images of a split and their labels."""

    pixels: NDArray[np.uint8]  # (N, H, W, 3) or (N, H, W)
    labels: NDArray[np.uint8]  # (N,)
    classes: list[str]


def select_pixels(
    preparation: Preparation, split: str, images: LabelledPixels, archive: Path
) -> Selection:
    """The images as records, class by class, in the order of an image folder.

    The records lie end to end in one file. It has the archive's time, so a restart makes the same
    one.
    """
    path = preparation.folder / f"{split}.records"
    sizes = []
    with atomic_write(path) as file:
        for pixels in images.pixels:
            sizes.append(file.write(record_of_pixels(pixels)))
    stat = archive.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    offsets = [0, *np.cumsum(sizes)[:-1].tolist()]
    rows = iter([FileRows(path.name, offsets, sizes, images.labels.tolist())])
    place = find_place(str(path))
    scan = Scan(place, "records", images.classes, place.names, rows)
    index = index_scan(scan, path.with_suffix(".index"))
    ids = np.argsort(index.label, kind="stable")
    return Selection(index, ids, index.label[ids])
