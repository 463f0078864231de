"""Prepares ImageNet-21K-P from image-net.org's processed tar, `imagenet21k_resized.tar`.

Its images are split and resized by the published script (Ridnik et al. 2021, "ImageNet-21K
Pretraining for the Masses"). Training can read the tar as it is; shards read faster.
"""

from pathlib import Path

from trainyard.data.index.build import open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.storage.manifest import Manifest
from trainyard.datasets.pack.pack import shuffled
from trainyard.datasets.prepare.preparation import Preparation
from trainyard.errors import DataError

PUBLISHED = {
    "fall11": {"train": 11_797_632, "val": 561_052, "classes": 11_221},
    "winter21": {"train": 11_060_223, "val": 522_500, "classes": 10_450},
}
_ORIGIN = "https://image-net.org/download-images.php (needs an account)"


def prepare_imagenet_21k_p(source: Path, preparation: Preparation) -> Manifest:
    """Packs the processed tar, or the only tar in the folder `source`; no image is changed."""
    tar = _only_tar(source.resolve())
    locations = find_splits(str(tar))
    if set(locations) != {"train", "val"}:
        raise DataError("prepare.no-train-and-val", path=tar, origin=_ORIGIN)
    with preparation.counter(f"reading the headers of {tar.name}", None) as progress:
        train, val = (open_index(locations[split], progress) for split in ("train", "val"))
    return preparation.pack(
        {"train": shuffled(train, preparation.order), "val": shuffled(val, None)},
        "imagenet21k",
        about={"source": tar.name, "seed": preparation.order},
    )


def _only_tar(source: Path) -> Path:
    if source.name.endswith((".gz", ".tgz")):
        raise DataError("tar.compressed", path=source, hint=" (gunzip)")
    tars = sorted(source.glob("*.tar")) if source.is_dir() else [source]
    if len(tars) != 1 or not tars[0].is_file():
        raise DataError("prepare.not-one-tar", path=source, origin=_ORIGIN)
    return tars[0]
