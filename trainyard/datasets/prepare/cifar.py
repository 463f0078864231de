"""Prepares CIFAR-10 and CIFAR-100, from their binary or Python versions, as packed pixels.

A binary record is one label byte (CIFAR-100: a coarse and a fine one), then 32 x 32 red, green and
blue values. A Python batch is a pickled dict of such rows and of labels.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from trainyard.data.arrays import Bytes
from trainyard.data.storage.manifest import Manifest
from trainyard.datasets.prepare.pickles import read_pickle
from trainyard.datasets.prepare.preparation import (
    LabelledPixels,
    Preparation,
    read_members,
    select_pixels,
)
from trainyard.errors import DataError

_ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar.html (binary or Python version)"
_MAX_BYTES = 200 << 20  # unpacked; the official ones are 184 MB
_PIXELS = 32 * 32 * 3
_PUBLISHED = {"train": 50_000, "val": 10_000}


@dataclass(frozen=True)
class _Release:
    archive: str
    md5: str  # from the data set's page
    files: dict[str, tuple[str, ...]]
    class_names: str
    label_bytes: int = 0  # of the binary version; the last one is the label
    keys: tuple[str, str] = ("", "")  # of the Python version: of labels, and of names


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


_BATCHES = {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "val": ("test_batch",)}
PICKLED = {
    "cifar10": _Release(
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        _BATCHES,
        "batches.meta",
        keys=("labels", "label_names"),
    ),
    "cifar100": _Release(
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        {"train": ("train",), "val": ("test",)},
        "meta",
        keys=("fine_labels", "fine_label_names"),
    ),
}


def prepare_cifar(name: str, source: Path, preparation: Preparation) -> Manifest:
    """Packs "cifar10" or "cifar100"; the official test images are the validation data.

    `source` is an archive, the folder that it unpacks to, or the folder that holds one of these.
    """
    release, path = _find(name, source.resolve())
    if path.is_file():
        preparation.check_archives({path: release.md5})
    files = (*release.files["train"], *release.files["val"], release.class_names)
    contents = read_members(path, files, _MAX_BYTES)
    classes = _class_names(release, contents[release.class_names], path)
    splits = {}
    for split, published in _PUBLISHED.items():
        some = {file: contents[file] for file in release.files[split]}
        if release.label_bytes:
            records = _records([*some.values()], release.label_bytes)
        else:
            records = np.vstack([_batch(release, *one, path) for one in some.items()])
        if records is None or not len(records) or records[:, 0].max() >= len(classes):
            raise DataError(
                "prepare.not-cifar",
                "{path}: its {split} files are not records of CIFAR",
                path=path,
                split=split,
            )
        pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        images = LabelledPixels(pixels, records[:, 0], classes)
        splits[split] = select_pixels(preparation, split, images, path, count=published)
    return preparation.pack(splits, name, about=preparation.about(name, splits, _PUBLISHED))


def _find(name: str, source: Path) -> tuple[_Release, Path]:
    """The version of a data set in a source, and its archive or folder. DataError without any."""
    versions = (RELEASES[name], PICKLED[name])
    folders = [source, *sorted(source.glob("*/"))] if source.is_dir() else []
    for release in versions:
        archive = source / release.archive if folders else source
        if archive.is_file() and archive.name == release.archive:
            return release, archive
    for release, folder in product(versions, folders):
        if all((folder / one).is_file() for one in (release.class_names, release.files["val"][0])):
            return release, folder
    archives = " and no ".join(release.archive for release in versions)
    raise DataError("prepare.missing-file", path=source, name=archives, origin=_ORIGIN)


def _class_names(release: _Release, content: bytes, path: Path) -> list[str]:
    if release.label_bytes:
        return content.decode("ascii", "replace").split()
    try:
        names = read_pickle(content)[release.keys[1]]
        return [name.decode() if isinstance(name, bytes) else f"{name}" for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(path, release.class_names, error) from None


def _batch(release: _Release, file: str, content: bytes, path: Path) -> Bytes:
    """A row per image of a pickled batch: label, then pixels."""
    try:
        values = read_pickle(content)
        labels, pixels = np.array(values[release.keys[0]]), values["data"]
        if labels.dtype.kind not in "iu" or not ((labels >= 0) & (labels < 256)).all():
            raise ValueError("its labels are no class numbers")
        if not isinstance(pixels, np.ndarray):  # all arrays there are uint8
            raise ValueError("its data is no array")
        rows = pixels.reshape(len(labels), _PIXELS)
        return np.hstack([labels[:, None].astype(np.uint8), rows])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _refused(path, file, error) from None


def _refused(path: Path, file: str, error: Exception) -> DataError:
    return DataError(
        "prepare.pickle-refused",
        "{path}: {file} is no batch of CIFAR ({reason}); nothing in it was run",
        path=path,
        file=file,
        reason=f"it lacks {error}" if isinstance(error, KeyError) else str(error),
    )


def _records(contents: list[bytes], label_bytes: int) -> Bytes | None:
    """A row per image: label, then pixels. None if a file does not consist of records."""
    size = label_bytes + _PIXELS
    if not all(content and len(content) % size == 0 for content in contents):
        return None
    rows = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, size)
    return rows[:, label_bytes - 1 :]
