"""Prepares ImageNet-1K (ILSVRC2012) from the official archives, without unpacking them."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from trainyard.data.formats.scan import FileRows, Scan
from trainyard.data.formats.tar import members
from trainyard.data.index.table import Index
from trainyard.data.storage.location import ResolvedLocation, find_place
from trainyard.data.storage.manifest import Manifest
from trainyard.data.storage.open import open_source
from trainyard.datasets.pack.pack import shuffled
from trainyard.datasets.pack.recode import Repair
from trainyard.datasets.prepare.class_archives import class_archives
from trainyard.datasets.prepare.devkit import Devkit, read_devkit
from trainyard.datasets.prepare.preparation import Preparation, find_archive
from trainyard.errors import DataError

# With MD5 sums from image-net.org.
ARCHIVES = {
    "train": ("ILSVRC2012_img_train.tar", "1d675b47d978889d74fa0da5fadfb00e"),
    "val": ("ILSVRC2012_img_val.tar", "29b22e2961454d5413ddabcf34fc5622"),
    "devkit": ("ILSVRC2012_devkit_t12.tar.gz", "fa75699e90414af021442c21a62c3abf"),
}
_ORIGIN = "https://image-net.org/challenges/LSVRC/2012/2012-downloads.php (needs an account)"
_PUBLISHED = {"training images": 1_281_167, "validation images": 50_000, "classes": 1000}
_VAL_NAME = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")


def prepare_imagenet_1k(source: Path, preparation: Preparation, *, repair: bool) -> Manifest:
    """Packs the three archives in the folder `source`; the images' bytes are not changed.

    `repair` re-encodes the few odd files, a PNG named .JPEG and CMYK JPEGs, as RGB JPEGs.
    """
    archives = {
        part: find_archive(source.resolve(), name, _ORIGIN) for part, (name, _) in ARCHIVES.items()
    }
    preparation.check_archives({archives[part]: md5 for part, (_, md5) in ARCHIVES.items()})
    devkit = read_devkit(archives["devkit"])
    train_scan = _train_scan(archives["train"], devkit)
    train = preparation.index(train_scan, [archives["train"]])
    val_scan = _val_scan(archives["val"], devkit, train.classes)
    val = preparation.index(val_scan, [archives[part] for part in ("val", "devkit", "train")])
    if preparation.checksum:
        _check_counts(train, val)
    return preparation.pack(
        {"train": shuffled(train, preparation.order), "val": shuffled(val, None)},
        "imagenet",
        recode=Repair() if repair else None,
        about={
            "source": "ILSVRC2012",
            "official": preparation.checksum,
            "seed": preparation.order,
            # For a subset: validation images whose class has no training images.
            "val_left_out": len(devkit.val) - len(val),
        },
    )


def _train_scan(path: Path, devkit: Devkit) -> Scan:
    place = find_place(str(path))
    classes: list[str] = []
    known = set(devkit.wnid_of.values())

    def rows() -> Iterator[FileRows]:
        for archive in class_archives(place):
            if archive.name not in known:
                raise DataError("prepare.class-not-in-devkit", path=path, name=archive.name)
            classes.append(archive.name)
            yield archive.rows(len(classes) - 1)

    return Scan(place, "class-tar", classes, place.names, rows())


def _val_scan(path: Path, devkit: Devkit, classes: tuple[str, ...]) -> Scan:
    place = find_place(str(path))
    return Scan(place, "tar", classes, place.names, _val_rows(place, devkit, classes))


def _val_rows(
    place: ResolvedLocation, devkit: Devkit, classes: tuple[str, ...]
) -> Iterator[FileRows]:
    """Images in the order of their numbers; only those of the given `classes`."""
    label_of = {wnid: label for label, wnid in enumerate(classes)}
    found = {}
    with closing(open_source(place.location)) as tar:
        for member in members(tar):
            match = _VAL_NAME.fullmatch(member.name)
            if not match or not 1 <= int(match[1]) <= len(devkit.val):
                raise DataError(
                    "prepare.image-not-in-devkit",
                    path=place.location,
                    name=member.name,
                    num_images=len(devkit.val),
                )
            found[int(match[1])] = member
    images = [found[n] for n in sorted(found) if devkit.val_wnid(n) in label_of]
    labels = [label_of[devkit.val_wnid(n)] for n in sorted(found) if devkit.val_wnid(n) in label_of]
    offsets, sizes = [m.offset for m in images], [m.size for m in images]
    yield FileRows(place.names[0], offsets, sizes, labels)


def _check_counts(train: Index, val: Index) -> None:
    found = (len(train), len(val), len(train.classes))
    for (what, published), count in zip(_PUBLISHED.items(), found, strict=True):
        if count != published:
            raise DataError(
                "prepare.wrong-imagenet-count", num_found=count, what=what, num_expected=published
            )
