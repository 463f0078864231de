"""Prepares CIFAR-10 and CIFAR-100 from their binary archives, as packed records of pixels.

A record is one label byte (CIFAR-100: a coarse and a fine one), then 32 x 32 red, green and blue
values.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainyard.data.storage.manifest import Manifest
from trainyard.datasets.prepare.preparation import (
    LabelledPixels,
    Preparation,
    find_archive,
    read_members,
    select_pixels,
)
from trainyard.errors import DataError

_ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar.html (binary version)"
_MAX_BYTES = 200 << 20  # unpacked; the official ones are 184 MB
_PIXELS = 32 * 32 * 3
_PUBLISHED = {"train": 50_000, "val": 10_000}


@dataclass(frozen=True)
class _Release:
    archive: str
    md5: str  # from the data set's page
    files: dict[str, tuple[str, ...]]
    class_names: str
    label_bytes: int  # the last one is the label


RELEASES = {
    "cifar10": _Release(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        {
            "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
            "val": ("test_batch.bin",),
        },
        "batches.meta.txt",
        1,
    ),
    "cifar100": _Release(
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        {"train": ("train.bin",), "val": ("test.bin",)},
        "fine_label_names.txt",
        2,
    ),
}


def prepare_cifar(name: str, source: Path, preparation: Preparation) -> Manifest:
    """Packs "cifar10" or "cifar100"; the official test images are the validation data."""
    release = RELEASES[name]
    archive = find_archive(source.resolve(), release.archive, _ORIGIN)
    preparation.check_archives({archive: release.md5})
    files = (*release.files["train"], *release.files["val"], release.class_names)
    contents = read_members(archive, files, _MAX_BYTES)
    classes = contents[release.class_names].decode("ascii", "replace").split()
    splits = {}
    for split, published in _PUBLISHED.items():
        records = _records([contents[file] for file in release.files[split]], release.label_bytes)
        if records is None or records[:, 0].max() >= len(classes):
            raise DataError(
                "prepare.not-cifar",
                "{path}: its {split} files are not records of CIFAR",
                path=archive,
                split=split,
            )
        pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        images = LabelledPixels(pixels, records[:, 0], classes)
        splits[split] = select_pixels(preparation, split, images, archive, count=published)
    about = {"source": name, "official": preparation.checksum}
    return preparation.pack(splits, name, about=about)


def _records(contents: list[bytes], label_bytes: int) -> NDArray[np.uint8] | None:
    """A row per image: label, then pixels. None if a file does not consist of records."""
    size = label_bytes + _PIXELS
    if not all(content and len(content) % size == 0 for content in contents):
        return None
    rows = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, size)
    return rows[:, label_bytes - 1 :]
