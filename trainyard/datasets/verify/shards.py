"""Checks that the files of a data set exist, are whole, and are those in `dataset.json`."""

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np

from trainyard.data import formats
from trainyard.data.index.build import Progress, index_scan
from trainyard.data.index.table import Index
from trainyard.data.storage.location import ResolvedLocation, find_place
from trainyard.data.storage.manifest import Manifest, Shard, manifest_of, read_manifest
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import is_remote
from trainyard.datasets.verify.checks import Check, Finding, checked
from trainyard.errors import DataError


@dataclass(frozen=True)
class Files:
    """The files of one split."""

    split: str
    place: ResolvedLocation
    """The files that exist."""
    listed: dict[str, Shard]
    """The manifest's entries by path."""
    missing: list[str]
    """Paths that are listed and do not exist."""
    has_manifest: bool
    of_images: bool = False
    """True if the listed files are lists of images' checksums, for a folder of images."""


def find_files(split: str, location: str, whole: str) -> Files:
    """The files of a split of the data set `whole`; DataError if none exist."""
    manifest = _manifest_in(whole)
    if manifest is None or split not in manifest.splits:
        return _unlisted_files(split, location)
    listed = {_path(whole, shard.name): shard for shard in manifest.splits[split].shards}
    missing = [path for path in listed if not _exists(path)]
    if manifest.format == "folder":
        place = find_place(location)
        return Files(split, place, listed, missing, has_manifest=True, of_images=True)
    if not missing:
        return Files(split, find_place(location), listed, [], has_manifest=True)
    names = tuple(shard.name for path, shard in listed.items() if path not in missing)
    if not names:
        raise DataError(f"{missing[0]}: no such file, and no other file that dataset.json lists")
    place = ResolvedLocation(location, None, whole, names, is_folder=False, can_gain=False)
    return Files(split, place, listed, missing, has_manifest=True)


def check_listing(splits: list[Files], whole: str) -> list[Check]:
    """Finds files that are listed but do not exist, and the reverse."""
    checks, extra = [], set()
    for files in splits:
        if files.has_manifest:
            found = [Finding("listed in dataset.json, but not there", p) for p in files.missing]
            about = f"{len(files.listed):,} listed in dataset.json"
            checks.append(checked(files.split, "files", about, found))
            extra |= _unknown(files, whole)
    if extra:
        names = ", ".join(files.split for files in splits)
        found = [Finding("not listed in dataset.json", path) for path in sorted(extra)]
        checks.append(checked(names, "other files", "", found, otherwise="note"))
    return checks


# --- structure: the data that indexing reads; file by file if it fails ---


def index_anew(files: Files, path: Path, progress: Progress) -> tuple[Index | None, list[Check]]:
    """An index of the whole files, saved in `path`, and checks of the data that indexing reads."""
    place = files.place
    names = data_files(place)
    about = f"{len(names):,} file{'s' * (len(names) != 1)}" if names else "folders"
    try:
        anew = index_scan(formats.scan(place), path, progress)
        about += "" if names else f": {_endings(anew)}"
        account = [_left_out(files.split, anew)] if anew.left_out else []
        return anew, [checked(files.split, "structure", about), *account]
    except (DataError, OSError) as error:
        if not names:
            raise DataError(str(error)) from None
        broken = {name: found for name in names if (found := _why_broken(place, name))}
        findings = list(broken.values()) or [Finding(str(error), place.location)]
    check = checked(files.split, "structure", about, findings)
    whole = tuple(name for name in names if name not in broken)
    if not broken or not whole:
        return None, [check]
    index, rest = index_anew(replace(files, place=replace(place, names=whole)), path, progress)
    return index, [check, *(other for other in rest if other.result != "ok")]


def _endings(index: Index) -> str:
    """The endings of the images that are read, with counts."""
    names = map(index.file_names.__getitem__, range(len(index.file_names)))
    found = Counter(os.path.splitext(name)[1].lower() for name in names)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in found.most_common())


def _left_out(split: str, index: Index) -> Check:
    """The account of the scan, a finding for each kind."""
    kinds, total = index.left_out.kinds, index.left_out.total
    lines = [Finding(f"{n:,} {kind}, such as {name}") for kind, (n, name) in kinds.items()]
    whole = f"{len(index) + total:,} found"
    return checked(split, "left out", whole, lines, count=total, otherwise="note")


def _why_broken(place: ResolvedLocation, name: str) -> Finding | None:
    """The problem with a single file, read alone; None if there is none."""
    path = place.path(name)
    try:
        scan = formats.scan(replace(place, names=(name,)))
        labels = np.array([label for rows in scan.rows for label in rows.labels])
    except (DataError, OSError) as error:
        return Finding(str(error), path)
    manifest = manifest_of(place.root, place.names) if not scan.classes else None
    if manifest is None or manifest.classes is None:
        return None
    wrong = labels[labels >= len(manifest.classes)]
    if not len(wrong):
        return None
    what = f"{len(wrong):,} labels up to {wrong.max()}, but dataset.json names"
    return Finding(f"{what} {len(manifest.classes):,} classes", path)


# --- paths ---


def _manifest_in(folder: str) -> Manifest | None:
    is_folder = is_remote(folder) or os.path.isdir(folder)
    return read_manifest(folder) if is_folder else None


def _unlisted_files(split: str, location: str) -> Files:
    """The files of a location; a manifest beside them may list them among others."""
    place = find_place(location)
    manifest = manifest_of(place.root, place.names)
    if manifest is None:
        return Files(split, place, {}, [], has_manifest=False)
    shards = {s.name: s for part in manifest.splits.values() for s in part.shards}
    folder = os.path.basename(place.root.rstrip("/"))
    found = {name: shards.get(name) or shards.get(f"{folder}/{name}") for name in place.names}
    listed = {plain(place.path(name)): shard for name, shard in found.items() if shard}
    return Files(split, place, listed, [], has_manifest=True)


def data_files(place: ResolvedLocation) -> list[str]:
    """The names of files that the format reads; empty for a folder of images."""
    try:
        watched = set(formats.scan(place).watched)
    except (DataError, OSError):  # a broken file hides the format: takes the most common suffix
        suffixes = Counter(os.path.splitext(name)[1] for name in place.names)
        common = suffixes.most_common(1)
        return [name for name in place.names if os.path.splitext(name)[1] == common[0][0]]
    return [name for name in place.names if name in watched]


def format_of(place: ResolvedLocation) -> ModuleType | None:
    """The reader of a place, even if some of its files are broken; None if all are."""
    for part in (place, *(replace(place, names=(name,)) for name in place.names)):
        try:
            return formats.FORMATS[formats.recognise(part)]
        except (DataError, OSError):
            continue
    return None


def _unknown(files: Files, whole: str) -> set[str]:
    """Files beside the listed ones, or among the named ones, that no split lists."""
    manifest = _manifest_in(whole)
    if manifest is None:
        paths = {plain(files.place.path(name)) for name in data_files(files.place)}
        return paths - files.listed.keys()
    if is_remote(whole):  # a server may not list its files
        return set()
    known = {_path(whole, s.name) for part in manifest.splits.values() for s in part.shards}
    folders = {os.path.dirname(path) for path in files.listed if os.path.isfile(path)}
    suffixes = {os.path.splitext(path)[1] for path in files.listed}
    there = {entry.path for folder in folders for entry in os.scandir(folder) if _is_data(entry)}
    return {path for path in there if os.path.splitext(path)[1] in suffixes} - known


def _is_data(entry: os.DirEntry[str]) -> bool:
    return entry.is_file() and not entry.name.startswith(".")


def _path(folder: str, name: str) -> str:
    return plain(os.path.join(folder, name))


def plain(path: str) -> str:
    """A path or URL in the form that is printed."""
    return path if is_remote(path) else os.path.normpath(path)


def _exists(path: str) -> bool:
    if not is_remote(path):
        return os.path.isfile(path)
    try:
        open_source(path).close()
    except OSError:
        return False
    return True
