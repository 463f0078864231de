"""Writes images that lie in arrays as a data set: a folder with a packed shard of their pixels."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainyard.data.decode.packed_record import MAX_SIDE, record_of_pixels
from trainyard.data.formats import packed
from trainyard.data.formats.scan import EncodedSample
from trainyard.datasets.prepare.preparation import make_folder
from trainyard.errors import DataError
from trainyard.files import fsync, writing

_AT_ONCE = 1024  # images that are taken from an array on a disk


def write_images(
    images: ArrayLike, labels: ArrayLike, names: Sequence[str], destination: str | os.PathLike[str]
) -> None:
    """Writes arrays as a data set, whose folder appears complete or not at all.

    `images`: uint8[N, height, width], or [N, height, width, 1] or [N, height, width, 3] of red,
    green and blue; an array of NumPy, or one on a disk that slices to such (a memory map, a data
    set of h5py). `labels`: N integers, positions in `names`, the classes. `destination/train` and
    `destination/val` are the splits of `destination`. DataError for other arrays, for a label
    without a name and for a destination that exists.
    """
    pixels: Any = images if hasattr(images, "shape") else np.asarray(images)
    numbers, path = np.asarray(labels), Path(destination)
    _check_images(pixels)
    _check_labels(numbers, len(pixels), names)
    if path.exists() or path.is_symlink():
        raise DataError(
            "arrays.destination-exists", "{path}: exists already; choose a new folder", path=path
        )
    make_folder(path.parent)
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as part,
        writing(path, part=Path(part)),
    ):
        shard = Path(part) / "data/images.packed"
        shard.parent.mkdir()
        packed.write(shard, _samples(pixels, numbers.reshape(-1)), names)
        fsync(shard)
        shard.parent.rename(path)


def _check_images(pixels: Any) -> None:
    shape, kind = tuple(pixels.shape), np.dtype(pixels.dtype)
    if kind != np.uint8 or not (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))):
        hint = ""
        if kind.kind == "f":
            hint = "; for values from 0 to 1: (images * 255).round().astype('uint8')"
        elif len(shape) == 4 and shape[1] in (1, 3):
            hint = "; for [N, channels, height, width]: images.transpose(0, 2, 3, 1)"
        raise DataError(
            "arrays.wrong-images",
            "images: has the shape {shape} of {type}; expected uint8[N, height, width] or "
            "[N, height, width, 3]{hint}",
            shape=list(shape),
            type=kind,
            hint=hint,
        )
    if not shape[0] or not 0 < min(shape[1:3]) <= max(shape[1:3]) <= MAX_SIDE:
        raise DataError(
            "arrays.empty-images",
            "images: has the shape {shape}; expected one image at least, and sides of 1 to "
            "{max_side:,} pixels",
            shape=list(shape),
            max_side=MAX_SIDE,
        )


def _check_labels(labels: NDArray[Any], count: int, names: Sequence[str]) -> None:
    if labels.dtype.kind not in "iu" or labels.shape not in ((count,), (count, 1)):
        raise DataError(
            "arrays.wrong-labels",
            "labels: has the shape {shape} of {type}; expected {num_images:,} integers, one for "
            "each image",
            shape=list(labels.shape),
            type=labels.dtype,
            num_images=count,
        )
    if isinstance(names, str | dict) or not all(isinstance(name, str) and name for name in names):
        raise DataError("arrays.wrong-names", "names: expected a list of texts, one for each class")
    if len({*names}) < len(names):
        twice = next(name for name in names if [*names].count(name) > 1)
        raise DataError("arrays.name-twice", "names: has {name!r} twice", name=twice)
    wrong = np.flatnonzero((labels.reshape(-1) < 0) | (labels.reshape(-1) >= len(names)))
    if len(wrong):
        raise DataError(
            "arrays.label-without-name",
            "labels: image {number:,} has label {label}, and names has {num_classes:,} names, of "
            "0 to {largest}",
            number=int(wrong[0]),
            label=int(labels.reshape(-1)[wrong[0]]),
            num_classes=len(names),
            largest=len(names) - 1,
        )


def _samples(images: Any, labels: NDArray[Any]) -> Iterator[EncodedSample]:
    for start in range(0, len(labels), _AT_ONCE):
        part = np.asarray(images[start : start + _AT_ONCE])
        if part.ndim == 4 and part.shape[3] == 1:
            part = part[..., 0]
        for number, pixels in enumerate(part, start):
            record = record_of_pixels(pixels)
            yield EncodedSample(record, ".packed", int(labels[number]), f"{number:08d}")
