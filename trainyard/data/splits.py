"""The train and val locations inside a data set that holds both."""

import glob
import os
from pathlib import Path

from trainyard.data import formats
from trainyard.data.location import find_place, split_of
from trainyard.data.manifest import read_manifest
from trainyard.data.source import is_remote
from trainyard.errors import DataError

# Names of a split's folder or part of its shards' names, the usual one first.
_NAMES = {"train": ("train",), "val": ("val", "validation")}
_SHARDS = ("*{}*.tar", "*{}*.h5", "*{}*.hdf5", "*{}*-of-*", "*{}*.tfrecord", "*{}*.tfrecords")


def train_and_val(location: str) -> dict[str, str]:
    """The locations of both splits of a data set."""
    splits = find_splits(location)
    missing = [split for split in ("train", "val") if split not in splits]
    if missing:
        raise DataError(
            f"{location}: has no {' and no '.join(missing)} data; expected folders train and val, "
            "or shards *train*.tar and *val*.tar; or name them by --data.train and --data.val"
        )
    return splits


def find_splits(location: str) -> dict[str, str]:
    """The locations of "train" and "val" inside one data set, as far as there are any."""
    if is_remote(location) or os.path.isdir(location):
        return _listed(location) or _in_folder(location)
    place = find_place(location)
    splits = () if place.split else formats.splits_inside(place)
    return {split: f"{location}#{split}" for split in splits if split in _NAMES}


def all_splits(location: str) -> dict[str, str]:
    """As `find_splits`, or the location itself under the name "data" or of its split."""
    return find_splits(location) or {split_of(location)[1] or "data": location}


def _listed(folder: str) -> dict[str, str]:
    """What the folder's manifest lists."""
    if glob.has_magic(folder) or "{" in folder:  # would be read as a pattern
        return {}
    manifest = read_manifest(folder)
    splits = manifest.splits if manifest else {}
    return {name: os.path.join(folder, splits[name].files) for name in _NAMES if name in splits}


def _in_folder(location: str) -> dict[str, str]:
    if is_remote(location):
        return {}
    folder = Path(location)
    splits: dict[str, str] = {}
    for split, names in _NAMES.items():
        for name in names:
            if (folder / name).is_dir():
                splits.setdefault(split, str(folder / name))
        for pattern in _SHARDS:
            pattern = pattern.format(split)
            if any(folder.glob(pattern)):
                splits.setdefault(split, os.path.join(glob.escape(location), pattern))
    return splits
