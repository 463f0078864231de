"""Prepares ImageNet-1K (ILSVRC2012) from the official archives, without unpacking them.

The development kit has the class of each validation image. It numbers classes by ILSVRC2012_ID,
which is not the usual order of labels, by sorted WordNet IDs (WNIDs).

ImageNet-21K-P comes from image-net.org's processed tar, `imagenet21k_resized.tar`, whose images are
split and resized by the published script (Ridnik et al. 2021, "ImageNet-21K Pretraining for the
Masses"). Training can read the tar as it is; shards read faster.
"""

import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainyard.data.formats.scan import FileRows, Scan
from trainyard.data.formats.tar import BufferedTarReader, Member, is_image, members
from trainyard.data.index.build import open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.index.table import Index
from trainyard.data.storage.location import ResolvedLocation, find_place
from trainyard.data.storage.manifest import Manifest
from trainyard.data.storage.open import open_source
from trainyard.datasets.pack.recode import Repair
from trainyard.datasets.pack.shards import shuffled
from trainyard.datasets.prepare.preparation import Preparation, find_archive, read_members
from trainyard.errors import DataError
from trainyard.installation import needed

_META = "data/meta.mat"
_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_MAX_BYTES = 64 << 20  # unpacked; the official kit is 2.5 MB packed
_WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Devkit:
    wnid_of: dict[int, str]
    """WNID by ILSVRC2012_ID, for leaves of the hierarchy: the classes with images."""
    val: tuple[int, ...]
    """The ILSVRC2012_ID of each validation image, by the number in its name, from 1."""

    def val_wnid(self, number: int) -> str:
        """The class of ILSVRC2012_val_<number>.JPEG. IndexError if there is no such image."""
        if number < 1:
            raise IndexError(number)
        return self.wnid_of[self.val[number - 1]]


def read_devkit(path: Path) -> Devkit:
    """Reads ILSVRC2012_devkit_t12.tar.gz in memory; needs scipy."""
    loadmat = needed("scipy.io", "imagenet", "the ILSVRC2012 devkit").loadmat
    contents = read_members(path, (_META, _TRUTH), _MAX_BYTES)
    try:
        synsets = loadmat(io.BytesIO(contents[_META]), squeeze_me=True)["synsets"]
        wnid_of = {
            int(synset["ILSVRC2012_ID"]): str(synset["WNID"])
            for synset in synsets
            if not int(synset["num_children"])
        }
        val = tuple(int(line) for line in contents[_TRUTH].split())
    except Exception as error:  # loadmat raises almost any error for a damaged file
        raise DataError(
            "prepare.not-the-devkit",
            "{path}: not the ILSVRC2012 devkit ({reason})",
            path=path,
            reason=str(error),
        ) from None
    strange = [wnid for wnid in wnid_of.values() if not _WNID.fullmatch(wnid)]
    if strange:  # WNIDs become folder names
        raise DataError(
            "prepare.not-a-wordnet-id",
            "{path}: {name!r} in {member} is no WordNet ID",
            path=path,
            name=strange[0],
            member=_META,
        )
    unknown = set(val) - set(wnid_of)
    if unknown:
        raise DataError(
            "prepare.undefined-class",
            "{path}: {member} has class {label}, which {other} does not have",
            path=path,
            member=_TRUTH,
            label=min(unknown),
            other=_META,
        )
    return Devkit(wnid_of, val)


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
    tar = find_place(str(archives["val"]))
    rows = _val_rows(tar, devkit, train.classes)
    val_scan = Scan(tar, "tar", train.classes, tar.names, rows)
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
    resolved = find_place(str(path))
    classes: list[str] = []
    known = set(devkit.wnid_of.values())

    def rows() -> Iterator[FileRows]:
        for name, images in class_archives(resolved):
            if name not in known:
                raise DataError(
                    "prepare.class-not-in-devkit",
                    "{path}: class {name!r} is none of the devkit's",
                    path=path,
                    name=name,
                )
            classes.append(name)
            yield _rows(resolved, images, [len(classes) - 1] * len(images))

    return Scan(resolved, "class-tar", classes, resolved.names, rows())


def _rows(resolved: ResolvedLocation, images: Sequence[Member], labels: list[int]) -> FileRows:
    offsets, sizes = [m.offset for m in images], [m.size for m in images]
    return FileRows(resolved.names[0], offsets, sizes, labels)


def _val_rows(
    resolved: ResolvedLocation, devkit: Devkit, classes: tuple[str, ...]
) -> Iterator[FileRows]:
    """Images in the order of their numbers; only those of the given `classes`."""
    label_of = {wnid: label for label, wnid in enumerate(classes)}
    by_number = {}
    with open_source(resolved.location) as tar:
        for member in members(tar):
            match = _VAL_NAME.fullmatch(member.name)
            if not match or not 1 <= int(match[1]) <= len(devkit.val):
                raise DataError(
                    "prepare.image-not-in-devkit",
                    "{path}: {name} is not among the {num_images:,} images that the devkit has "
                    "classes for",
                    path=resolved.location,
                    name=member.name,
                    num_images=len(devkit.val),
                )
            if int(match[1]) in by_number:
                raise DataError("prepare.member-twice", path=resolved.location, name=member.name)
            by_number[int(match[1])] = member
    numbers = [n for n in sorted(by_number) if devkit.val_wnid(n) in label_of]
    labels = [label_of[devkit.val_wnid(n)] for n in numbers]
    yield _rows(resolved, [by_number[n] for n in numbers], labels)


def _check_counts(train: Index, val: Index) -> None:
    counts = (len(train), len(val), len(train.classes))
    for (what, published), count in zip(_PUBLISHED.items(), counts, strict=True):
        if count != published:
            raise DataError(
                "prepare.wrong-imagenet-count",
                "ILSVRC2012: {num_found:,} {what} found instead of {num_expected:,}",
                num_found=count,
                what=what,
                num_expected=published,
            )


def class_archives(resolved: ResolvedLocation) -> Iterator[tuple[str, list[Member]]]:
    """The classes in stored order, and the images of each in the order of their names.

    DataError for a class that occurs twice, or any other member.
    """
    seen = set()
    [file] = resolved.names
    with BufferedTarReader(open_source(resolved.path(file))) as tar:
        wrong = partial(DataError, path=tar.name)
        for member in members(tar):
            if not member.name.endswith(".tar"):
                raise wrong(
                    "prepare.not-a-class-tar",
                    "{path}: {name} is no tar of a class",
                    name=member.name,
                )
            name = os.path.basename(member.name).removesuffix(".tar")
            if not name.strip("."):  # it becomes a folder's name
                raise wrong(
                    "prepare.not-a-class-name", "{path}: {name!r} is no name of a class", name=name
                )
            if name in seen:
                raise wrong("prepare.member-twice", name=name)
            seen.add(name)
            images = [*members(tar, member.offset, member.offset + member.size)]
            if others := [image.name for image in images if not is_image(image.name)]:
                other = f"{member.name}: {others[0]}"
                raise wrong("prepare.not-an-image", "{path}: {name} is no image", name=other)
            images.sort(key=lambda image: os.path.basename(image.name))
            yield name, images


PUBLISHED = {
    "fall11": {"train": 11_797_632, "val": 561_052, "classes": 11_221},
    "winter21": {"train": 11_060_223, "val": 522_500, "classes": 10_450},
}
_ORIGIN_21K = "https://image-net.org/download-images.php (needs an account)"


def prepare_imagenet_21k_p(source: Path, preparation: Preparation) -> Manifest:
    """Packs the processed tar, or the only tar in the folder `source`; no image is changed."""
    tar = _only_tar(source.resolve())
    locations = find_splits(str(tar))
    if set(locations) != {"train", "val"}:
        raise DataError(
            "prepare.no-train-and-val",
            "{path}: has no train and val; imagenet21k_resized.tar.gz of {origin} has, gunzipped",
            path=tar,
            origin=_ORIGIN_21K,
        )
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
        raise DataError(
            "prepare.not-one-tar",
            "{path}: not one tar; imagenet21k_resized.tar.gz is of {origin}",
            path=source,
            origin=_ORIGIN_21K,
        )
    return tars[0]
