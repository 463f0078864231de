"""Finds images in two indices: validation images that are trained on falsify the accuracy."""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from trainyard.data.index.table import Index
from trainyard.data.rng import fold_in
from trainyard.data.storage.source import is_remote, real_path
from trainyard.errors import DataError

Hashes = NDArray[np.uint64]

KINDS = {
    "folder": "image",
    "list": "image",
    "images": "image",
    "webdataset": "tar",
    "tar": "tar",
    "tfrecord": "tfrecord",
    "hdf5": "hdf5",
    "packed": "packed",
    "parquet": "parquet",
}
"""The kind of a format's files; a file of one kind cannot be read as another."""


def check_apart(train: Index | tuple[str, ...], val: Index, *, few: int = 100_000) -> None:
    """DataError that names the first validation image that is a training image too.

    `train`: the index of the training data, or the shards of a stream.
    Symbolic links of folders are followed. Links of single files are followed in data sets of up to
    `few` files only, since it takes minutes on a file server; `trainyard data verify` follows them
    all.
    """
    follow = isinstance(train, Index) and max(map(_count, (train, val))) <= few
    if not isinstance(train, Index):
        shared = _rows_in_files(val, train)
    elif not follow and _lie_apart(train, val):
        return
    else:
        shared = same_places(train, val, follow=follow)
    if len(shared):
        file, offset, _ = val.locate(int(shared[0]))
        raise DataError(
            "data.val-in-train",
            num_shared=len(shared),
            num_images=len(val),
            path=file,
            offset=offset,
        )


def same_places(train: Index, val: Index, *, follow: bool = True) -> NDArray[np.int64]:
    """The rows of `val` at the same place of the same file as a row of `train`.

    `follow`: links of files are followed; links of folders always are.
    """
    if not _kinds(train) & _kinds(val):
        return np.empty(0, np.int64)
    ours, theirs = (hash_names(_real_paths(index, follow)) for index in (train, val))
    in_train = np.flatnonzero(np.isin(ours, theirs)[train.file])
    in_val = np.flatnonzero(np.isin(theirs, ours)[val.file])
    places = fold_in(0, ours[train.file[in_train]].view(np.int64), train.places[in_train])
    found = fold_in(0, theirs[val.file[in_val]].view(np.int64), val.places[in_val])
    shared: NDArray[np.int64] = in_val[np.isin(found, places)]
    return shared


def hash_names(texts: Iterable[str]) -> Hashes:
    """A 64-bit hash of each text, so that fourteen million names need no Python objects."""
    digests = (hashlib.blake2b(os.fsencode(text), digest_size=8).digest() for text in texts)
    numbers = (int.from_bytes(digest, sys.byteorder) for digest in digests)
    return np.fromiter(numbers, np.uint64)


def _kinds(index: Index) -> set[str]:
    """The kinds of an index's files; a merged index may have several."""
    return {KINDS.get(name, name) for name in index.format.split(" and ")}


def _count(index: Index) -> int:
    return len(index.file_names)


def _lie_apart(train: Index, val: Index) -> bool:
    """True if two data sets of image folders share no folder; reads no file names.

    Links are followed, so a class that is a link to one of the other split is shared.
    """
    if {train.format, val.format} != {"folder"}:
        return False
    return not _real_folders(train) & _real_folders(val)


def _real_folders(index: Index) -> set[str]:
    """All folders that images can lie in: the folders that the index watches."""
    # Names with .. are folders of other splits, watched for their classes.
    names = (name for name in index.stamps if ".." not in name.split(os.sep))
    return {os.path.realpath(os.path.join(index.root, name)) for name in names}


def _rows_in_files(val: Index, files: Iterable[str]) -> NDArray[np.int64]:
    known = hash_names(map(real_path, files))
    return np.flatnonzero(np.isin(hash_names(_real_paths(val, follow=True)), known)[val.file])


def _real_paths(index: Index, follow: bool) -> Iterator[str]:
    real_folder = cache(os.path.realpath)
    for row in range(_count(index)):
        path = os.path.join(index.root, index.file_names[row])
        if is_remote(path):
            yield path
        elif follow and os.path.islink(path):
            yield os.path.realpath(path)
        else:
            folder, name = os.path.split(path)
            yield os.path.join(real_folder(folder), name)
