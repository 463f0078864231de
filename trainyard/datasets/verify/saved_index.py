"""Compares a saved index with the data, and lists the differences."""

import os
from collections.abc import Iterator

import numpy as np

from trainyard.data.index.build import saved_index
from trainyard.data.index.overlap import Hashes, hash_names
from trainyard.data.index.table import Index, true_fingerprint
from trainyard.data.rng import fold_in
from trainyard.datasets.verify.checks import Check, Finding, checked


def check_saved_index(split: str, location: str, now: Index) -> Check:
    """Compares the saved index of a location with one made of the data just now."""
    saved = saved_index(location)
    samples = f"{len(now):,} samples"
    if saved is None:
        return checked(split, "index", f"{samples}; no index saved yet")
    if saved.fingerprint == now.fingerprint == true_fingerprint(saved):
        return checked(split, "index", samples)
    found = [*differences(saved, now), Finding(f"run `trainyard data index {location}`")]
    return checked(split, "index", samples, found, count=len(found) - 1)


def differences(saved: Index, now: Index) -> Iterator[Finding]:
    """Classes and files that are in one of two indices only, or differ."""
    for name in sorted({*now.classes} - {*saved.classes}):
        yield Finding(f"class {name!r} is new")
    for name in sorted({*saved.classes} - {*now.classes}):
        yield Finding(f"class {name!r} is gone")
    old_names, new_names = hashes_of_names(saved), hashes_of_names(now)
    old_rows, new_rows = _hashes_of_rows(saved, old_names), _hashes_of_rows(now, new_names)
    for file in np.flatnonzero(~np.isin(old_names, new_names)).tolist():
        yield Finding("gone since it was indexed", _path(saved, file))
    for file in np.flatnonzero(~np.isin(new_names, old_names)).tolist():
        yield Finding("new since the index was made", _path(now, file))
    changed = old_names[np.unique(saved.file[~np.isin(old_rows, new_rows)])]
    more = new_names[np.unique(now.file[~np.isin(new_rows, old_rows)])]
    is_changed = np.isin(new_names, np.concatenate([changed, more])) & np.isin(new_names, old_names)
    for file in np.flatnonzero(is_changed).tolist():
        yield Finding("changed since it was indexed", _path(now, file))


def hashes_of_names(index: Index) -> Hashes:
    """uint64[files]: hashes of file names."""
    return hash_names(index.file_names)


def _hashes_of_rows(index: Index, names: Hashes) -> Hashes:
    """Hashes of the file, offset, size and class of each sample."""
    if index.lists is None:
        classes = hash_names(index.classes)[index.label]
    else:
        classes = hash_names("\0".join(index.class_names(row)) for row in range(len(index)))
    file = names[index.file]
    return fold_in(0, file.view(np.int64), index.offset, index.size, classes.view(np.int64))


def _path(index: Index, file: int) -> str:
    return os.path.join(index.root, index.file_names[file])
