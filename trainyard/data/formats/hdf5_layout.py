"""The layout of an HDF5 file of images: the rows of each split, and the names of classes."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.scan import MAX_CLASSES
from trainyard.data.formats.split_names import split_named
from trainyard.errors import DataError
from trainyard.hints import did_you_mean

IMAGES, TARGETS, NAMES = "encoded_images", "targets", "class_names"
FILES = "filenames"

# Rows of ILSVRC2012 in fuel's file, for copies without the table of splits.
_TRAIN, _VAL, _TEST, _CLASSES = 1_281_167, 50_000, 100_000, 1000
_FUEL_ROWS = (_TRAIN + _VAL + _TEST, _TRAIN + _VAL)  # of images and targets

Rows = NDArray[np.int64]


class SplitRows(NamedTuple):
    name: str
    images: Rows
    labels: Rows | None


def check_inside(file: Any, key: Any, path: str) -> Any:
    """The data set at a key, or a reference to it. DataError if its data lies in another file.

    That file may be any on this machine, and HDF5 reads zeros if it is missing.
    """
    from h5py import Dataset, h5d

    found = file[key]
    if not isinstance(found, Dataset):
        raise DataError(
            "hdf5.not-a-dataset", "{path}: {dataset} is no dataset", path=path, dataset=found.name
        )
    settings = found.id.get_create_plist()
    if settings.get_layout() == h5d.VIRTUAL or settings.get_external_count():
        raise DataError(
            "hdf5.needs-repack",
            path=path,
            dataset=found.name,
            reason="keeps its data in other files",
        )
    return found


def read_targets(file: Any, classes: Sequence[str] | None, path: str) -> Rows:
    """The class numbers of a split's images; DataError if they are none."""
    stored = file[TARGETS]
    if stored.dtype.kind not in "iu":
        raise DataError(
            "hdf5.targets-not-integers",
            "{path}: targets are {type}, expected integers",
            path=path,
            type=str(stored.dtype),
        )
    targets: Rows = stored[...].astype(np.int64).reshape(-1)
    limit = MAX_CLASSES if classes is None else len(classes)
    wrong = np.flatnonzero((targets < 0) | (targets >= limit))
    if len(wrong):
        count = "" if classes is None else f" among {limit} classes"
        raise DataError(
            "hdf5.not-a-class-number",
            "{path}: targets row {row} is {value}, no class number{hint}",
            path=path,
            row=int(wrong[0]),
            value=int(targets[wrong[0]]),
            hint=count,
        )
    return targets


def find_splits(file: Any, path: str) -> list[SplitRows]:
    """The splits of a file in stored order; a single one with an empty name if it has none."""
    images, labels = len(file[IMAGES]), len(file[TARGETS])
    if "split" in file.attrs:
        splits = _table_of_splits(file, path)
    elif (images, labels) in (_FUEL_ROWS, (_TRAIN + _VAL, _TRAIN + _VAL)):
        train, val, test = np.split(np.arange(images), [_TRAIN, _TRAIN + _VAL])
        splits = [SplitRows("train", train, train), SplitRows("val", val, val)]
        splits += [SplitRows("test", test, None)] if len(test) else []
    else:
        splits = [SplitRows("", np.arange(images), np.arange(labels))]
    for split in splits:
        if split.labels is not None and len(split.labels) != len(split.images):
            raise DataError(
                "hdf5.images-without-targets",
                "{path}: {split} has {num_images:,} images, but {num_labels:,} targets",
                path=path,
                split=split.name or "it",
                num_images=len(split.images),
                num_labels=len(split.labels),
            )
    return splits


def left_out_of(splits: Sequence[SplitRows], images: int, path: str) -> LeftOut:
    """The images without a label, and those in no split. DataError for one in two splits."""
    read = [split.images for split in splits if split.labels is not None]
    times = np.bincount(np.concatenate([*read, np.empty(0, np.int64)]), minlength=images)
    if (times > 1).any():
        raise DataError(
            "hdf5.row-in-two-splits",
            "{path}: its splits name row {row} of encoded_images more than once",
            path=path,
            row=int(np.argmax(times > 1)),
        )
    found, is_known = LeftOut(), times > 0
    for name, rows, labels in splits:
        if labels is None:
            added = len(np.unique(rows[~is_known[rows]]))
            is_known[rows] = True
            if added:
                found.add("images without a label", f"{path}#{name}", added)
    if not is_known.all():
        example = f"{path}, row {np.argmin(is_known)}"
        found.add("images in no split", example, int((~is_known).sum()))
    return found


def _table_of_splits(file: Any, path: str) -> list[SplitRows]:
    """The splits in fuel's table, which has a line for each dataset of each split."""
    table = np.ravel(file.attrs["split"])
    if not {"split", "source", "start", "stop", "available"} <= set(table.dtype.names or ()):
        raise DataError(
            "hdf5.unknown-split-table",
            "{path}: its attribute `split` is not fuel's table of splits",
            path=path,
        )
    found: dict[str, dict[str, Rows]] = {}
    for line in table:
        name, source = _text(line["split"]), _text(line["source"])
        if source in (IMAGES, TARGETS) and np.ravel(line["available"])[0]:
            rows = _rows_of(line, file, len(file[source]), path)
            if rows is None:
                raise DataError(
                    "hdf5.split-beyond-rows",
                    "{path}: split {split} names rows of {dataset} that are not there",
                    path=path,
                    split=name,
                    dataset=source,
                )
            if source in found.setdefault(name, {}):
                raise DataError(
                    "hdf5.split-listed-twice",
                    "{path}: split {split} has two lines of {dataset}",
                    path=path,
                    split=name,
                    dataset=source,
                )
            found[name][source] = rows
    splits = [
        SplitRows(_split(name, rows, path), rows[IMAGES], rows.get(TARGETS))
        for name, rows in found.items()
        if IMAGES in rows
    ]
    if len({split.name for split in splits}) < len(splits):
        raise DataError(
            "hdf5.splits-alike",
            "{path}: several of its splits are one, {names}",
            path=path,
            names=", ".join(found),
        )
    if not splits:
        raise DataError(
            "hdf5.empty-splits",
            "{path}: its table of splits names no rows of encoded_images",
            path=path,
        )
    return splits


def _split(name: str, rows: dict[str, Rows], path: str) -> str:
    """The split that a name stands for; images without labels may have any name."""
    split = split_named(name)
    if not split and TARGETS in rows:
        hint = did_you_mean(name, ("train", "valid", "test"))
        raise DataError(
            "hdf5.unknown-split",
            "{path}: its split {split!r} is none of train, val and test{hint}",
            path=path,
            split=name,
            hint=hint,
        )
    return split or name


def _rows_of(line: Any, file: Any, count: int, path: str) -> Rows | None:
    """The rows that a line of fuel's table names; None if any is not below `count`."""
    chosen = line["indices"] if "indices" in line.dtype.names else None
    if chosen:
        rows: Rows = check_inside(file, chosen, path)[...].astype(np.int64).reshape(-1)
        return rows if ((rows >= 0) & (rows < count)).all() else None
    start, stop = (int(np.ravel(line[key])[0]) for key in ("start", "stop"))
    return np.arange(start, stop) if 0 <= start <= stop <= count else None


def _text(value: bytes | str) -> str:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


# --- names of classes ---


def find_classes(file: Any, path: str) -> list[str] | None:
    """Names by number; None for a plain file without names. DataError if the order is unknown."""
    if NAMES in file:
        names = [_text(name) for name in file[NAMES][...].reshape(-1)]
        if len(set(names)) < len(names):
            raise DataError("data.class-name-twice", path=path)
        return names
    splits = find_splits(file, path)
    if not splits[0].name:
        return None
    targets = read_targets(file, None, path)
    found = _names_in_files(file, targets)
    if found is None and _is_ilsvrc2012(splits, targets):
        found = (files("trainyard.data.formats") / "ilsvrc2012.txt").read_text().split()
    if found is None:
        raise DataError(
            "hdf5.unnamed-classes",
            "{path}: nothing in it says what its {num_classes} class numbers mean, and fuel's are "
            "in no common order; add a dataset class_names of their names",
            path=path,
            num_classes=int(targets.max(initial=-1)) + 1,
        )
    return found


def _names_in_files(file: Any, targets: Rows) -> list[str] | None:
    """The WordNet ids in the names of ImageNet's training files, such as n01440764_10026.JPEG.

    They distinguish ILSVRC2012 from ILSVRC2010 and name a subset. None unless every class has one.
    """
    if FILES not in file or file[FILES].dtype.kind != "S" or file[FILES].dtype.itemsize < 10:
        return None
    stored = file[FILES][: len(targets)].reshape(-1)
    letters = stored.astype("S10").view(np.uint8).reshape(-1, 10)
    digits = letters[:, 1:9].astype(np.int64) - ord("0")
    is_wnid = (letters[:, 0] == ord("n")) & (letters[:, 9] == ord("_"))
    is_wnid &= ((digits >= 0) & (digits <= 9)).all(axis=1)
    wnids = digits @ 10 ** np.arange(7, -1, -1)
    pairs = np.unique(targets[is_wnid] * 10**8 + wnids[is_wnid])
    labels, wnids = pairs // 10**8, pairs % 10**8
    is_named = np.array_equal(labels, np.arange(targets.max(initial=-1) + 1))
    if not is_named or len(np.unique(wnids)) < len(wnids):
        return None
    return [f"n{wnid:08d}" for wnid in wnids]


def _is_ilsvrc2012(splits: list[SplitRows], targets: Rows) -> bool:
    """True for the only data set of 1000 classes whose test images have no labels in fuel."""
    unlabelled = {split.name for split in splits if split.labels is None}
    is_whole = unlabelled == {"test"} or len(targets) == _TRAIN + _VAL
    return is_whole and len(np.unique(targets)) == _CLASSES == targets.max() + 1
