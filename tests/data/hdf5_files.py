"""HDF5 files with a dataset of encoded images."""

from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np

BYTES = h5py.vlen_dtype(np.uint8)


def as_array(image: bytes) -> Any:
    return np.frombuffer(image, np.uint8)


def write_one_by_one(file: h5py.File, images: list[bytes], **options: Any) -> None:
    dataset = file.create_dataset("encoded_images", (len(images),), BYTES, **options)
    for row, image in enumerate(images):
        dataset[row] = as_array(image)


def write_plain(path: Path, images: list[bytes], **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        write_one_by_one(file, images, **options)
        file["targets"] = np.arange(len(images)) % 2
    return path


def split_array(splits: dict[str, dict[str, tuple[Any, ...]]], *, nested: bool) -> Any:
    """The table as fuel's H5PYDataset makes it; numpy has read its dtype in two ways."""
    one = (1,) if nested else ()
    kind = np.dtype(
        [
            ("split", "S5"),
            ("source", "S14"),
            ("start", np.int64, one),
            ("stop", np.int64, one),
            ("indices", h5py.special_dtype(ref=h5py.Reference)),
            ("available", bool, one),
            ("comment", "S1"),
        ]
    )
    sources = sorted({source for split in splits.values() for source in split})
    table = np.empty(len(splits) * len(sources), kind)
    for line, (split, source) in zip(table, product(splits, sources), strict=True):
        found = splits[split].get(source)
        start, stop, *indices = found or (0, 0)
        reference = indices[0] if indices else h5py.Reference()
        values = (split.encode(), source.encode(), start, stop, reference, found is not None, b".")
        for name, value in zip(kind.names or (), values, strict=True):
            line[name] = value
    return table
