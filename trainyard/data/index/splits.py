"""Finds the train and val locations inside a data set that holds both."""

import glob
import os
import re
from collections.abc import Sequence
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from pathlib import Path

from trainyard.data import formats
from trainyard.data.formats.split_names import splits_named, words_of
from trainyard.data.storage.hub import is_on_hub
from trainyard.data.storage.location import find_place, options_of, split_of, take_secrets
from trainyard.data.storage.manifest import FILE_NAME, read_manifest
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError

# Names of a split's folder in lower case, the usual one first. A folder of test images is for
# validation where there is no other.
_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}
_COMPRESSED = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz)$", re.IGNORECASE)
_SHARDS = (
    *("*.tar", "*.h5", "*.hdf5", "*.packed", "*.parquet"),
    *("*-of-*", "*.tfrecord", "*.tfrecords"),
)


def train_and_val(location: str, *, may_share: bool = False) -> dict[str, str | None]:
    """The locations of both splits of a data set. DataError if one is missing.

    With `may_share`, val data can be a share of the train data: its location is None then, and a
    data set without any split is train data.
    """
    location = take_secrets(location)
    splits = find_splits(location)
    if may_share and "val" not in splits:
        return {"train": splits.get("train", location), "val": None}
    missing = [split for split in ("train", "val") if split not in splits]
    if missing:
        wanted = "expected folders train and val, or shards *train*.tar and *val*.tar"
        if is_remote(location):
            wanted = f"expected {_why_not_listed(location)}"
        elif "val" in missing:
            share = "the same command with --data.val_share 0.1 validates on a tenth of its images"
            wanted = f"{share}; {wanted}"
        raise DataError(
            f"{location}: has no {' and no '.join(missing)} data; {wanted}; or name them by "
            "--data.train and --data.val"
        )
    return {split: splits[split] for split in ("train", "val")}


def find_splits(location: str) -> dict[str, str]:
    """The locations of "train" and "val" inside one data set; absent splits are left out."""
    location = take_secrets(location)
    options = options_of(location)
    folder = location.removesuffix(options)
    if is_remote(location) or os.path.isdir(folder):
        found = _listed(folder) or _in_folder(folder)
        return {split: place + options for split, place in found.items()}
    place = find_place(location)
    splits = () if place.split else formats.splits_inside(place)
    found = {split: f"{location}#{split}" for split in splits}
    if "val" not in found and "test" in found:
        found["val"] = found["test"]
    return {split: found[split] for split in _NAMES if split in found}


def all_splits(location: str) -> dict[str, str]:
    """Like `find_splits`; without any, the location itself, as "data" or by its own split."""
    location = take_secrets(location)
    return find_splits(location) or {split_of(location)[1] or "data": location}


def _listed(folder: str) -> dict[str, str]:
    """The splits in the folder's manifest."""
    if glob.has_magic(folder) or "{" in folder:  # its path would be read as a pattern
        return {}
    manifest = read_manifest(folder)
    splits = manifest.splits if manifest else {}
    return {name: os.path.join(folder, splits[name].files) for name in _NAMES if name in splits}


def _why_not_listed(url: str) -> str:
    """A phrase for an error: the manifest that a URL lacks, and its server's answer."""
    name = os.path.join(url, FILE_NAME)
    try:
        open_source(name).close()
    except OSError as error:
        return f"{FILE_NAME} there ({str(error).removeprefix(f'{name}: ')})"
    return f"them in {FILE_NAME}"


def _in_folder(location: str) -> dict[str, str]:
    if is_on_hub(location):
        return _on_hub(location)
    if is_remote(location):
        return {}
    splits: dict[str, str] = {}
    names = sorted(name for name in os.listdir(location) if not name.startswith("."))
    for split, folders in _NAMES.items():
        for wanted in folders:
            for folder in sorted(names, key=lambda name: name != wanted):
                if folder.lower() == wanted and _can_be_split(Path(location) / folder):
                    splits.setdefault(split, str(Path(location) / folder))
        for kind in _SHARDS:
            shards = [name for name in matching(names, kind) if split in splits_named(name)]
            if shards and split not in splits:
                _check_one_split(location, shards)
                _check_all_read(location, split, kind, names)
                pattern = _pattern(location, split, kind, shards=shards, names=names)
                splits[split] = os.path.join(glob.escape(location), pattern)
    inside = os.path.join(location, "data")  # as repositories of the Hub keep their Parquet
    if not splits and any(name.endswith(".parquet") for name in _names_in(inside)):
        return _in_folder(inside)
    return splits


def _on_hub(location: str) -> dict[str, str]:
    """The splits of a repository of Parquet or WebDataset, or of a folder in it."""
    from trainyard.data.storage.remote.hub_files import files_below  # loads urllib3

    if glob.has_magic(location) or "{" in location:
        return {}
    paths, splits = files_below(location), {}
    for split, words in (("train", ("train",)), ("val", ("val", "test"))):
        for word, kind in ((word, kind) for word in words for kind in ("*.parquet", "*.tar")):
            shards = [path for path in paths if _is_shard(path, word, kind)]
            folders = sorted({os.path.dirname(path) for path in shards})
            if len(folders) > 1:
                raise DataError(
                    f"{location}: holds {word} data in several folders, {', '.join(folders)}: "
                    f"name one, as in {location.rstrip('/')}/{folders[0]}"
                )
            if shards and split not in splits:
                folder = os.path.join(location, folders[0])
                names = [os.path.basename(p) for p in paths if os.path.dirname(p) == folders[0]]
                shards = [os.path.basename(path) for path in shards]
                pattern = _pattern(folder, word, kind, shards=shards, names=names)
                splits[split] = os.path.join(folder, pattern)
    return splits


def _is_shard(path: str, word: str, kind: str) -> bool:
    name = os.path.basename(path)
    found = splits_named(name) if word != "test" else words_of(name)
    return word in found and bool(fnmatchcase(name, kind))


def _names_in(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _can_be_split(folder: Path) -> bool:
    """False for test images without classes, which data sets often come with."""
    return folder.is_dir() and (
        folder.name.lower() != "test" or any(entry.is_dir() for entry in folder.iterdir())
    )


def _check_one_split(location: str, shards: Sequence[str]) -> None:
    for name in shards:
        if len(splits_named(name)) > 1:
            raise DataError(
                f"{os.path.join(location, name)}: its name says train and val, and a file can be "
                "of one split only: rename it, or name the data by --data.train and --data.val"
            )


def _check_all_read(location: str, split: str, kind: str, names: Sequence[str]) -> None:
    """DataError for a file that looks like a shard of the split and would be left out."""
    for name in names:
        is_other_case = not fnmatchcase(name, kind) and fnmatchcase(name.lower(), kind)
        is_compressed = kind == "*.tar" and _COMPRESSED.search(name)
        if split in splits_named(name) and (is_other_case or is_compressed):
            remedy = "decompress it" if is_compressed else f"rename it to {name.lower()}"
            raise DataError(
                f"{os.path.join(location, name)}: a shard of {split} that would not be read: "
                f"{remedy}, move it away, or name the data by --data.train and --data.val"
            )


def _pattern(
    location: str, split: str, kind: str, *, shards: Sequence[str], names: Sequence[str]
) -> str:
    """A glob for the shards of a split among the names in a folder."""
    before, word, _ = shards[0].lower().rpartition(split)
    head = glob.escape(shards[0][: len(before + word)])
    for pattern in (f"*{split}{kind}", f"*[!a-zA-Z]{split}[!a-zA-Z]{kind}", f"{head}{kind}"):
        if matching(names, pattern) == shards:
            return pattern
    raise DataError(
        f"{location}: no pattern tells its {split} shards, such as {shards[0]}, from other files: "
        "name the data by --data.train and --data.val"
    )
