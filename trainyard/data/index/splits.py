"""Finds the train and val locations inside a data set that holds both."""

import glob
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from itertools import islice
from typing import NamedTuple

from trainyard.data import formats
from trainyard.data.formats.list_splits import names_splits
from trainyard.data.formats.listing import SUFFIXES as LIST_SUFFIXES
from trainyard.data.formats.remedies import COMPRESSED
from trainyard.data.formats.scan import ARRAY_SUFFIX, IMAGE_SUFFIXES, is_hidden
from trainyard.data.formats.split_names import (
    SPLITS,
    check_no_splits,
    split_named,
    splits_named,
    words_of,
)
from trainyard.data.storage.hub import files_below, is_on_hub
from trainyard.data.storage.location import (
    expand_braces,
    find_place,
    options_of,
    split_of,
    take_secrets,
)
from trainyard.data.storage.manifest import FILE_NAME, read_manifest
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import is_remote, reason_of
from trainyard.errors import DataError
from trainyard.printable import how_many

_STEMS = ("train", "val", "dev", "test", "eval")  # every word for a split begins with one
_LOOKED_INTO = 1000  # folders that an error message, or a look for images, takes the time for
_LISTS = (*LIST_SUFFIXES, ".mat")
_LIST_FOLDERS = ("meta", "labels", "lists", "splits")  # beside class folders


class Splits(NamedTuple):
    """The splits in a location."""

    found: dict[str, str]
    """The location of each, of SPLITS."""
    folder: str
    """The location, or the folder in it that was entered."""

    def chosen(self) -> dict[str, str]:
        """The locations of "train" and "val"; without other data, test data are for validation."""
        val = self.found.get("val") or self.found.get("test")
        train = self.found.get("train")
        return {name: place for name, place in (("train", train), ("val", val)) if place}

    def whole(self, location: str) -> str:
        """The location of all data in a location, of which these are the splits."""
        return self.folder if self.folder == location else self.folder + options_of(location)


def train_and_val(location: str, *, may_share: bool = False) -> dict[str, str | None]:
    """The locations of both splits of a data set. DataError if one is missing.

    With `may_share`, val data can be a share of the train data: its location is None then, and a
    data set without any split is train data.
    """
    location = take_secrets(location)
    found = _find(location)
    splits = found.chosen()
    if may_share and "val" not in splits:
        return {"train": splits.get("train") or found.whole(location), "val": None}
    missing = [split for split in ("train", "val") if split not in splits]
    if missing:
        if not splits and os.path.isdir(location):
            check_no_splits(location, _listed_in(location)[0])
        wanted = "expected folders train and val, or shards *train*.tar and *val*.tar"
        if is_remote(location):
            wanted = f"expected {_why_not_listed(location)}"
        elif deeper := _deeper(location):
            wanted = f"did you mean --data {shlex.quote(deeper)}?"
        elif "val" in missing:
            share = "the same command with --data.val_share 0.1 validates on a tenth of its images"
            wanted = "; ".join([*_without_classes(location), share, wanted])
        raise DataError(
            "data.missing-split",
            "{location}: has no {names} data; {hint}; or name them by --data.train and --data.val",
            location=location,
            names=" and no ".join(missing),
            hint=wanted,
        )
    return {split: splits[split] for split in ("train", "val")}


def find_splits(location: str) -> dict[str, str]:
    """The locations of "train" and "val" inside one data set; absent splits are left out.

    Test data are for validation where there is no other. DataError if several folders or shards
    could be one split, or a folder could be a split or a class.
    """
    return _find(take_secrets(location)).chosen()


def without_splits(location: str) -> str:
    """The location of data without splits: the folder inside that holds all images, or itself."""
    return _find(location := take_secrets(location)).whole(location)


def all_splits(location: str, *, is_divided: bool = False) -> dict[str, str]:
    """Like `find_splits`; without any, `without_splits`, as "data" or by its own split.

    `is_divided`: DataError if there are validation images, as the others are to be divided.
    """
    location = take_secrets(location)
    splits = _find(location)
    found = splits.chosen() or {split_of(location)[1] or "data": splits.whole(location)}
    if is_divided and "val" in found:
        raise DataError(
            "data.needless-division",
            "{location}: has validation images, {val}; --val-share and --val-fold are for data "
            "without: leave them out",
            location=location,
            val=found["val"],
        )
    return found


def split_remarks(location: str) -> list[str]:
    """Remarks about the choice of splits in a location: what is entered, and what is left out."""
    location = take_secrets(location)
    splits = _find(location)
    chosen = splits.chosen()
    remarks = []
    if splits.folder not in (location, location.removesuffix(options_of(location))):
        what = "its splits" if chosen else "all its images"
        remarks.append(f"{location}: {what} lie in {splits.folder}")
    if "val" not in chosen and (names := [*_split_lists(splits.folder)]):
        several = [os.path.basename(name) for name in names if names_splits(name)]
        how = f"{location}#train=LIST#val=LIST takes the images that lists name"
        if several:
            how = f"LIST#split={several[0]} takes the splits of the images in a list"
        remarks.append(f"{_first_of(names, 2)}: not used: {how}")
    left_out = [place for place in splits.found.values() if place not in chosen.values()]
    if chosen and not is_remote(location) and os.path.isdir(splits.folder):
        entered = {split_of(place)[0] for place in splits.found.values()}
        folders = (os.path.join(splits.folder, name) for name in _listed_in(splits.folder)[0])
        left_out += [
            path for path in folders if not any(place.startswith(path) for place in entered)
        ]
        for folder in {location.removesuffix(options_of(location)), splits.folder}:
            lists = (name for name in _listed_in(folder)[1] if name.endswith(LIST_SUFFIXES))
            left_out += [os.path.join(folder, name) for name in lists if splits_named(name)]
        left_out += _other_shards(splits.folder, entered)
        remarks += _without_classes(splits.folder)
    if left_out:
        used = " and ".join(chosen.values())
        remarks.append(f"{', '.join(sorted(left_out))}: left out beside {used}")
    return remarks


def above_all_images(folder: str) -> str:
    """The folder above one that holds all of its images; "" for any other."""
    folder = os.path.normpath(folder)
    above = os.path.dirname(folder) or "."
    try:
        inside = _only_with_images(above) if os.path.isdir(folder) else ""
    except PermissionError:  # it is no part of the data
        return ""
    return above if inside and os.path.normpath(inside) == folder else ""


def _split_lists(images: str) -> Iterator[str]:
    """The lists of splits in a folder of images, beside the one of all images, or a list."""
    if is_remote(images) or not os.path.isdir(images):
        folder, name = os.path.split(images)
        if not is_remote(images) and name.lower().endswith(_LISTS) and not splits_named(name):
            listed = _listed_in(folder or ".")[1]
            yield from (os.path.join(folder, one) for one in listed if _has_train(one))
        return
    if top := above_all_images(images):
        inside = (os.path.join(top, name) for name in _listed_in(top)[0])
        folders = [one for one in inside if not _has_image(one)]
    else:  # a look into each class folder would take too long
        top = images
        folders = [os.path.join(top, name) for name in _LIST_FOLDERS if name in _listed_in(top)[0]]
    for folder in dict.fromkeys((top, *folders, images)):
        for name in _listed_in(folder)[1]:
            if name.lower().endswith(_LISTS) and (splits_named(name) or names_splits(name)):
                yield os.path.normpath(os.path.join(folder, name))


def _has_train(name: str) -> bool:
    """True for a list of training data, among others or not."""
    is_list = name.lower().endswith(_LISTS)
    return is_list and ("train" in splits_named(name) or names_splits(name))


def _first_of(names: Sequence[str], count: int = 1) -> str:
    more = f" and {len(names) - count:,} more" if names[count:] else ""
    return ", ".join(names[:count]) + more


def _other_shards(folder: str, entered: Iterable[str]) -> list[str]:
    """Names the shards in a folder that belong to none of some locations; nothing without any."""
    paths = {os.path.join(folder, name) for name in formats.shards_among(_listed_in(folder)[1])}
    for place in entered:
        paths -= {*expand_braces(place), *matching(paths, place)}
    return [_first_of(sorted(paths))] if paths else []


def names_test(location: str) -> bool:
    """True if a location is named like test data."""
    path, split = split_of(location)
    return split_named(split or os.path.basename(path)) == "test"


def _find(location: str) -> Splits:
    if options := options_of(location):
        folder = location.removesuffix(options)
        has_lists = any(f"#{split}=" in options for split in SPLITS)  # of the splits
        if (is_remote(folder) or os.path.isdir(folder)) and not has_lists:
            without = _find(folder)
            with_options = {split: path + options for split, path in without.found.items()}
            return without._replace(found=with_options)
    if is_remote(location):
        return Splits(_listed(location) or _on_hub(location), location)
    if os.path.isdir(location):
        for folder in _entered(location):
            if found := _listed(folder) or _in_folder(folder):
                return Splits(found, folder)
        inside = _only_with_images(location)
        return _find(inside) if inside else Splits({}, location)
    place = find_place(location)
    splits = () if place.split else formats.splits_inside(place)
    return Splits({s: f"{location}#{s}" for s in SPLITS if s in splits}, location)


def _entered(location: str) -> Iterator[str]:
    """A folder, and those inside that may hold its splits: the only one, and `data`."""
    folders, files = _listed_in(location)
    is_one = len(folders) == 1 and not any(map(_is_image, files))
    for folder in (location, os.path.join(location, folders[0])) if is_one else (location,):
        yield folder
        inside = os.path.join(folder, "data")  # as repositories of the Hub keep their Parquet
        if os.path.isdir(inside) and matching(_listed_in(inside)[1], "*.parquet"):
            yield inside


def _only_with_images(location: str) -> str:
    """The folder of class folders that holds all images of a location; "" if none does."""
    folders, files = _listed_in(location)
    if any(map(_is_image, files)) or _holds_shards(location, files):
        return ""
    paths = (os.path.join(location, name) for name in folders)
    holding = [*islice(filter(_has_image, paths), 2)]
    inside, files = _listed_in(holding[0]) if len(holding) == 1 else ([], [])
    return holding[0] if inside and not any(map(_is_image, files)) else ""


def _holds_shards(location: str, files: Sequence[str]) -> bool:
    """True unless the shards among files are beside the data, as an archive that was unpacked."""
    if not formats.shards_among(files):
        return False
    try:
        return formats.recognise(find_place(location)) != "folder"
    except (DataError, OSError):
        return True


def _listed(folder: str) -> dict[str, str]:
    """The splits in the folder's manifest."""
    if glob.has_magic(folder) or "{" in folder:  # its path would be read as a pattern
        return {}
    manifest = read_manifest(folder)
    splits = manifest.splits if manifest else {}
    return {name: os.path.join(folder, splits[name].files) for name in SPLITS if name in splits}


def _why_not_listed(url: str) -> str:
    """A phrase for an error: the manifest that a URL lacks, and its server's answer."""
    name = os.path.join(url, FILE_NAME)
    try:
        open_source(name).close()
    except OSError as error:
        return f"{FILE_NAME} there ({reason_of(error, name)})"
    return f"them in {FILE_NAME}"


def _deeper(location: str) -> str | None:
    """A folder inside that holds splits, for an error message."""
    for folder, _, _ in islice(os.walk(location), _LOOKED_INTO):
        try:
            if {"train", "val"} <= Splits(_in_folder(folder), folder).chosen().keys():
                return folder
        except (DataError, OSError):
            continue
    return None


# --- a folder ---


def _in_folder(location: str) -> dict[str, str]:
    """The splits among the folders and shards of a folder."""
    folders, files = _listed_in(location)
    candidates: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name in folders:
        split = split_named(name)
        if split and (path := _with_classes(os.path.join(location, name))):
            candidates[split].append(path)
    for split in SPLITS:
        is_used = split != "test" or not candidates["val"]
        candidates[split] += _patterns(location, split, files) if is_used else []
    for split, places in candidates.items():
        if len(places) > 1 and (split != "test" or not candidates["val"]):
            raise DataError(
                "data.several-of-split",
                "{names}: both are named like {split} data: move one away, or name the data by "
                "--data.train and --data.val",
                names=" and ".join(places),
                split=split,
            )
    found = {split: places[0] for split, places in candidates.items() if places}
    _check_no_class(location, folders, found)
    return found


def _listed_in(folder: str) -> tuple[list[str], list[str]]:
    """The sorted names of the folders and of the files in a folder, without hidden ones."""
    folders, files = list[str](), list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_hidden(entry.name):
                (folders if entry.is_dir() else files).append(entry.name)
    return sorted(folders), sorted(files)


def _with_classes(folder: str) -> str:
    """The folder, or one of the same split that is all it holds; "" for images without classes."""
    folders, files = _listed_in(folder)
    if len(folders) == 1 and split_named(folders[0]) == split_named(os.path.basename(folder)):
        folder = os.path.join(folder, folders[0])
        folders, files = _listed_in(folder)
    return folder if folders or formats.shards_among(files) else ""


def _without_classes(location: str) -> list[str]:
    """Remarks about folders that are splits by name, and hold images without classes."""
    remarks = []
    for name in _listed_in(location)[0] if os.path.isdir(location) else ():
        path = os.path.join(location, name)
        if not split_named(name) or _with_classes(path):
            continue
        if count := sum(map(_is_image, _listed_in(path)[1])):
            images = how_many(count, "image")
            remarks.append(f"{path}: holds {images}, but no folder of a class: it is not used")
    return remarks


def _check_no_class(location: str, folders: Sequence[str], found: dict[str, str]) -> None:
    """DataError for a lone split beside folders of images: it may be a class as they are."""
    lone = next(iter(found.values()), "")
    if len(found) != 1 or not os.path.isdir(lone):
        return
    others = [name for name in folders if not splits_named(name)]
    others = [name for name in others if _has_image(os.path.join(location, name))]
    if others:
        raise DataError(
            "data.split-or-class",
            "{location}: is {folder} a class, like {other}, or a split of the data? For a class, "
            "give --data.train {location} --data.val_share 0.1; for a split, name {path} and the "
            "other split by --data.train and --data.val",
            location=location,
            folder=os.path.relpath(lone, location),
            other=others[0],
            path=lone,
        )


def _has_image(folder: str) -> bool:
    """True if an image lies in a folder at any depth, and for one that is too large to look."""
    for looked, (_, folders, names) in enumerate(os.walk(folder, followlinks=True)):
        if looked > _LOOKED_INTO or any(map(_is_image, names)):
            return True
        folders[:] = [name for name in folders if not is_hidden(name)]
    return False


def _is_image(name: str) -> bool:
    suffix = os.path.splitext(name)[1].lower()
    return (suffix in IMAGE_SUFFIXES or suffix == ARRAY_SUFFIX) and not is_hidden(name)


# --- shards ---


def _patterns(location: str, split: str, files: Sequence[str]) -> Iterator[str]:
    """A glob for the shards of a split, of each kind of file."""
    names = list(files)
    for kind in formats.patterns():
        of_kind = {*matching(names, kind)}
        names = [name for name in names if name not in of_kind]  # a-of-b.parquet is of one kind
        shards = sorted(name for name in of_kind if split in splits_named(name))
        if shards:
            _check_one_split(location, shards)
            _check_all_read(location, split, kind, files)
            pattern = _pattern(location, split, kind, shards=shards, names=files)
            yield os.path.join(glob.escape(location), pattern)


def _on_hub(location: str) -> dict[str, str]:
    """The splits of a repository of Parquet or WebDataset, or of a folder in it."""
    if not is_on_hub(location) or glob.has_magic(location) or "{" in location:
        return {}
    paths, splits = files_below(location), dict[str, str]()
    for split, kind in ((split, kind) for split in SPLITS for kind in ("*.parquet", "*.tar")):
        names = {path: os.path.basename(path) for path in paths}
        shards = [path for path in matching(paths, kind) if split in splits_named(names[path])]
        folders = sorted({os.path.dirname(path) for path in shards})
        if split in splits or (split == "test" and "val" in splits):
            continue
        if len(folders) > 1:
            raise DataError(
                "hub.several-of-split",
                "{location}: holds {split} data in several folders, {names}: name one, as in "
                "{path}",
                location=location,
                split=split,
                names=", ".join(folders),
                path=f"{location.rstrip('/')}/{folders[0]}",
            )
        if shards:
            folder = os.path.join(location, folders[0])
            beside = [names[path] for path in paths if os.path.dirname(path) == folders[0]]
            own = [names[path] for path in shards]
            pattern = _pattern(folder, split, kind, shards=own, names=beside)
            splits[split] = os.path.join(folder, pattern)
    return splits


def _check_one_split(location: str, shards: Sequence[str]) -> None:
    for name in shards:
        if len(named := splits_named(name)) > 1:
            raise DataError(
                "data.file-of-two-splits",
                "{path}: its name says {names}, and a file can be of one split only: rename it, "
                "or name the data by --data.train and --data.val",
                path=os.path.join(location, name),
                names=" and ".join(sorted(named)),
            )


def _check_all_read(location: str, split: str, kind: str, names: Sequence[str]) -> None:
    """DataError for a file that looks like a shard of the split and would be left out."""
    for name in names:
        is_other_case = not fnmatchcase(name, kind) and fnmatchcase(name.lower(), kind)
        is_compressed = kind == "*.tar" and name.lower().endswith(COMPRESSED)
        if split in splits_named(name) and (is_other_case or is_compressed):
            remedy = "decompress it" if is_compressed else f"rename it to {name.lower()}"
            raise DataError(
                "data.shard-passed-over",
                "{path}: a shard of {split} that would not be read: {hint}, move it away, or name "
                "the data by --data.train and --data.val",
                path=os.path.join(location, name),
                split=split,
                hint=remedy,
            )


def _pattern(
    location: str, split: str, kind: str, *, shards: Sequence[str], names: Sequence[str]
) -> str:
    """A glob for the shards of a split among the names in a folder."""
    word = next(word for word in words_of(shards[0]) if split_named(word) == split)
    stem = next(stem for stem in _STEMS if word.startswith(stem))
    before, word, _ = shards[0].lower().rpartition(stem)
    head = glob.escape(shards[0][: len(before + word)])
    for pattern in (f"*{stem}{kind}", f"*[!a-zA-Z]{stem}[!a-zA-Z]{kind}", f"{head}{kind}"):
        if matching(names, pattern) == shards:
            return pattern
    raise DataError(
        "data.no-shard-pattern",
        "{location}: no pattern tells its {split} shards, such as {name}, from other files: name "
        "the data by --data.train and --data.val",
        location=location,
        split=split,
        name=shards[0],
    )
