"""Prepares MNIST and Fashion-MNIST from their four IDX files, as packed records of grey pixels.

An IDX file of bytes starts with 0, 0, 8 and its number of dimensions; each dimension follows as a
big-endian 32-bit integer, and then the bytes.
"""

import gzip
import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainyard.data.arrays import Bytes
from trainyard.data.storage.manifest import Manifest
from trainyard.datasets.prepare.preparation import LabelledPixels, Preparation, select_pixels
from trainyard.errors import DataError

_FILES = {"train": "train", "val": "t10k"}
_PUBLISHED = {"train": 60_000, "val": 10_000}
_MAX_BYTES = 64 << 20  # unpacked; the official images are 47 MB
_DEPTHS = ("", "*/", "*/*/")


@dataclass(frozen=True)
class _Release:
    classes: tuple[str, ...]
    origin: str
    md5: dict[str, str]
    """MD5 sums of unpacked files, as sources compress them in their own ways. Empty: unknown."""


RELEASES = {
    "fashion-mnist": _Release(
        (
            *("t-shirt or top", "trouser", "pullover", "dress", "coat"),
            *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ),
        "https://github.com/zalandoresearch/fashion-mnist, or Debian's dataset-fashion-mnist",
        {
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
    ),
    "mnist": _Release(tuple("0123456789"), "https://yann.lecun.com/exdb/mnist", {}),
}


def prepare_mnist(name: str, source: Path, preparation: Preparation) -> Manifest:
    """Packs "mnist" or "fashion-mnist"; the official test images are the validation data.

    `source` is the folder of the files, plain or as .gz, or one that holds it (`MNIST/raw`).
    """
    release = RELEASES[name]
    splits = {}
    for split, prefix in _FILES.items():
        path, pixels, labels = _read_split(source.resolve(), prefix, release, preparation.checksum)
        images = LabelledPixels(pixels, labels, list(release.classes))
        splits[split] = select_pixels(preparation, split, images, path, count=_PUBLISHED[split])
    return preparation.pack(splits, name, about=preparation.about(name, splits, _PUBLISHED))


def _read_split(
    folder: Path, prefix: str, release: _Release, checksum: bool
) -> tuple[Path, Bytes, Bytes]:
    """The file of the images, their pixels (N, H, W), and their labels (N,)."""
    path, pixels = _read(folder, f"{prefix}-images-idx3-ubyte", release, checksum)
    _, labels = _read(folder, f"{prefix}-labels-idx1-ubyte", release, checksum)
    if len(pixels) != len(labels) or not len(labels):
        raise DataError(
            "prepare.image-label-mismatch",
            "{path}: has {num_images:,} images, but {num_labels:,} labels",
            path=path,
            num_images=len(pixels),
            num_labels=len(labels),
        )
    if labels.max() >= len(release.classes):
        raise DataError(
            "prepare.label-too-large",
            "{path}: {name} has label {label}; the largest is 9",
            path=folder,
            name=prefix,
            label=int(labels.max()),
        )
    return path, pixels, labels


def _read(folder: Path, name: str, release: _Release, checksum: bool) -> tuple[Path, Bytes]:
    """An IDX file, plain or compressed, and its array. The name tells the dimensions."""
    pattern = name.replace("-idx", "[-.]idx")  # copies have a dot there, also in a folder's name
    found = (folder.glob(f"{depth}{pattern}{end}") for depth in _DEPTHS for end in ("", ".gz"))
    paths = next(filter(None, ([one for one in part if one.is_file()] for part in found)), [None])
    path, *others = paths
    if others:  # of another data set: both would fit
        raise DataError(
            "prepare.several-files",
            "{path}: holds {names}: name the folder of one",
            path=folder,
            names=" and ".join(sorted(map(str, paths))),
        )
    if path is None:
        raise DataError(
            "prepare.missing-file", path=folder, name=f"{name}(.gz)", origin=release.origin
        )
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("file.unreadable", path=path, reason=str(error)) from None
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if checksum and release.md5.get(name, md5) != md5:
        raise DataError(
            "prepare.wrong-unpacked-md5",
            "{path}: the MD5 of its unpacked content is {md5} instead of {expected}: it is "
            "damaged or another release; take it as it is with --no-checksum",
            path=path,
            md5=md5,
            expected=release.md5[name],
        )
    dimensions = 3 if "idx3" in name else 1
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(
            "prepare.not-idx",
            "{path}: is no IDX file of bytes in {num_dimensions} dimensions",
            path=path,
            num_dimensions=dimensions,
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) != header + math.prod(shape):
        raise DataError(
            "prepare.wrong-idx-size",
            "{path}: is truncated, or longer than its header says",
            path=path,
        )
    return path, np.frombuffer(content, np.uint8, offset=header).reshape(shape)
