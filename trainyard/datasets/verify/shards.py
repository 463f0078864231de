"""Checks that the files of a data set exist, are whole, and are those in `dataset.json`."""

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.data import formats
from trainyard.data.index.build import Progress, index_scan
from trainyard.data.index.table import Index
from trainyard.data.storage.location import ResolvedLocation, find_place
from trainyard.data.storage.manifest import Shard, manifest_of, read_manifest, shards_listed
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import is_remote
from trainyard.datasets.verify.checks import Check, Finding, checked, of_error
from trainyard.errors import DataError
from trainyard.printable import how_many


@dataclass(frozen=True)
class Files:
    """The files of one split."""

    split: str
    resolved: ResolvedLocation
    """The files that exist."""
    listed: dict[str, Shard]
    """The entries of `dataset.json` by path."""
    missing: list[str]
    """Paths that are listed and do not exist."""


def find_files(split: str, location: str, whole: str) -> Files:
    """The files of a split of the data set `whole`; DataError if none exist."""
    manifest = read_manifest(whole) if is_remote(whole) or os.path.isdir(whole) else None
    if manifest is None or split not in manifest.splits:
        return Files(split, resolved := find_place(location), _listed_beside(resolved), [])
    if manifest.format == "folder":  # it lists files for `sha256sum -c`, no shards
        return Files(split, find_place(location), {}, [])
    shards = manifest.splits[split].shards
    listed = {plain(os.path.join(whole, shard.name)): shard for shard in shards}
    missing = [path for path in listed if not _exists(path)]
    if not missing:
        return Files(split, find_place(location), listed, [])
    names = tuple(shard.name for path, shard in listed.items() if path not in missing)
    if not names:
        raise DataError(
            "verify.no-listed-file",
            "{path}: no such file, and no other file that dataset.json lists",
            path=missing[0],
        )
    resolved = ResolvedLocation(location, None, whole, names, is_folder=False, can_gain=False)
    return Files(split, resolved, listed, missing)


def check_listing(files: Files) -> Check:
    """Finds files that are listed but do not exist."""
    what = "listed in dataset.json, but not there"
    findings = [Finding("verify.missing", what, path) for path in files.missing]
    return checked(files.split, "files", f"{len(files.listed):,} listed in dataset.json", findings)


def index_anew(files: Files, path: Path, progress: Progress) -> tuple[Index | None, list[Check]]:
    """An index of the whole files, saved in `path`, and checks of the data that indexing reads.

    Broken shards are findings, each of them. DataError if a folder of images cannot be indexed.
    """
    resolved, findings = files.resolved, list[Finding]()
    try:
        index = index_scan(formats.scan(resolved), path, progress)
    except (DataError, OSError) as error:
        names = _shards_in(resolved)
        broken = {name: why for name in names if (why := _why_broken(resolved, name))}
        if not names and isinstance(error, OSError):
            name, reason = error.filename or resolved.location, error.strerror or str(error)
            raise DataError("file.unreadable", path=name, reason=reason) from None
        if not names:
            raise
        findings = [*broken.values()] or [of_error(error, resolved.location)]
        unbroken = tuple(name for name in names if name not in broken)
        if not unbroken and isinstance(error, DataError) and error.code in formats.FITS_NONE:
            raise
        check = checked(files.split, "structure", how_many(len(names), "file"), findings)
        if not broken or not unbroken:
            return None, [check]
        rest = replace(resolved, names=unbroken, is_folder=False)
        index_of_rest, checks = index_anew(replace(files, resolved=rest), path, progress)
        return index_of_rest, [check, *(other for other in checks if other.result != "ok")]
    text = f"{how_many(len(index.file_names), 'file')}: {_endings(index)}"
    checks = [checked(files.split, "structure", text)]
    return index, [*checks, _left_out(files.split, index)] if index.left_out else checks


def _endings(index: Index) -> str:
    """The endings of the files that are read, with counts."""
    names = map(index.file_names.__getitem__, range(len(index.file_names)))
    endings = Counter(os.path.splitext(name)[1].lower() for name in names)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in endings.most_common())


def _left_out(split: str, index: Index) -> Check:
    """The account of the scan, a finding for each kind."""
    kinds, total = index.left_out.kinds, index.left_out.total
    texts = (f"{text}, such as {name}" for text, name in index.left_out.lines())
    lines = [Finding("verify.left-out", line) for line in texts]
    total_text, count = f"{len(index) + total:,} found", sum(n for n, _ in kinds.values())
    return checked(split, "left out", total_text, lines, count=count, otherwise="note")


def _shards_in(resolved: ResolvedLocation) -> list[str]:
    """The names with the most common ending."""
    endings = Counter(os.path.splitext(name)[1] for name in resolved.names).most_common(1)
    return [name for name in resolved.names if os.path.splitext(name)[1] == endings[0][0]]


def _why_broken(resolved: ResolvedLocation, name: str) -> Finding | None:
    """The problem with a single file, read alone; None if there is none."""
    one = replace(resolved, location=resolved.path(name), names=(name,), is_folder=False)
    try:
        for _ in formats.scan(one).rows:
            pass
    except (DataError, OSError) as error:
        return of_error(error, resolved.path(name))
    return None


# --- paths ---


def _listed_beside(resolved: ResolvedLocation) -> dict[str, Shard]:
    """The entries of a manifest beside files that a glob or a list names, by path."""
    manifest = manifest_of(resolved.root, resolved.names)
    if manifest and manifest.format == "folder":
        return {}
    entries = shards_listed(manifest, resolved.root, resolved.names)
    return {plain(resolved.path(name)): shard for name, shard in entries.items()}


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
