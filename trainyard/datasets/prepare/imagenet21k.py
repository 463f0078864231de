"""Prepares ImageNet-21K-P: the classes of ImageNet-21K with enough images, split and scaled.

The rules are those of its published script (Ridnik et al. 2021, "ImageNet-21K Pretraining for the
Masses"): a class is kept if it has more than 500 images, and its first 50 images by name, compared
byte by byte, are for validation.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainyard.data.formats.scan import FileRows, Scan
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.index.table import Index
from trainyard.data.storage.location import ResolvedLocation, find_place
from trainyard.data.storage.manifest import Manifest
from trainyard.datasets.pack.pack import Selection, shuffled
from trainyard.datasets.pack.recode import Recode, ShortSide, Squash
from trainyard.datasets.prepare.class_archives import class_archives
from trainyard.datasets.prepare.preparation import Preparation
from trainyard.errors import DataError

PUBLISHED = {
    "fall11": {"train": 11_797_632, "val": 561_052, "classes": 11_221},
    "winter21": {"train": 11_060_223, "val": 522_500, "classes": 10_450},
}
RESIZES: dict[str, Recode] = {
    "224-squash": Squash(224, quality=95),
    "256": ShortSide(256, quality=95),
}
_MORE_THAN = 500  # images of a class that is kept
_VAL_IMAGES = 50  # per class
_ORIGIN = "https://image-net.org/download-images.php (needs an account)"


def prepare_imagenet_21k_p(
    source: Path, preparation: Preparation, *, resize: str | None = None
) -> Manifest:
    """Packs fall11_whole.tar, winter21_whole.tar, a folder of per-class tars, or the processed tar.

    `resize` is one of RESIZES, by default the published "224-squash".
    """
    tar = _only_tar(source.resolve())
    about = {"source": tar.name, "seed": preparation.order}
    if is_processed(tar):
        if resize:
            raise DataError(f"{tar}: its images are already resized: drop --resize")
        return preparation.pack(_processed(tar, preparation), "imagenet21k", about=about)
    place = find_place(str(tar))
    index = preparation.index(
        _scan(place), [Path(place.path(name)) for name in place.files(".tar")]
    )
    return preparation.pack(
        _split(index, preparation.order),
        "imagenet21k",
        recode=RESIZES[resize or "224-squash"],
        about=about,
    )


def is_processed(source: Path) -> bool:
    """True for a tar of split and resized images, such as imagenet21k_resized.tar.

    Training can read such a tar directly.
    """
    tar = _only_tar(source)
    return tar.is_file() and set(find_splits(str(tar))) == {"train", "val"}


def _only_tar(source: Path) -> Path:
    """The tar that `source` is, or its only tar; else `source`, a folder of per-class tars."""
    if source.name.endswith((".gz", ".tgz")):
        raise DataError(f"{source}: a compressed tar cannot be read by offset: gunzip it first")
    tars = sorted(source.glob("*.tar")) if source.is_dir() else [source]
    if not tars or not tars[0].is_file():
        raise DataError(
            f"{source}: no tar here; ImageNet-21K can be had from {_ORIGIN}, the processed "
            "imagenet21k_resized.tar.gz too"
        )
    return tars[0] if len(tars) == 1 else source


def _processed(tar: Path, preparation: Preparation) -> dict[str, Selection]:
    locations = find_splits(str(tar))
    with preparation.counter(f"reading the headers of {tar.name}", None) as progress:
        train, val = (open_index(locations[split], progress) for split in ("train", "val"))
    return {"train": shuffled(train, preparation.order), "val": shuffled(val, None)}


def _scan(place: ResolvedLocation) -> Scan:
    classes: list[str] = []

    def rows() -> Iterator[FileRows]:
        for archive in class_archives(place):
            if len(archive.images) > _MORE_THAN:
                classes.append(archive.name)
                yield archive.rows(len(classes) - 1)
        if not classes:
            raise DataError(f"{place.location}: no class in it has more than {_MORE_THAN} images")

    return Scan(place, "class-tars", classes, place.files(".tar"), rows())


def _split(index: Index, seed: int | None) -> dict[str, Selection]:
    # A class's rows are consecutive and in the order of the images' names.
    begins = np.flatnonzero(np.diff(index.label, prepend=-1))
    lengths = np.diff(begins, append=len(index))
    is_val = np.arange(len(index)) - np.repeat(begins, lengths) < _VAL_IMAGES
    everything, val = shuffled(index, seed), np.flatnonzero(is_val)
    keep = ~is_val[everything.ids]
    return {
        "train": Selection(index, everything.ids[keep], everything.labels[keep]),
        "val": Selection(index, val, index.label[val]),
    }
