"""Finds images in two indices: validation images that are trained on falsify the accuracy."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from stat import S_ISLNK

import numpy as np
from numpy.typing import NDArray

from trainyard.data import formats
from trainyard.data.arrays import Ints
from trainyard.data.index.table import Index
from trainyard.data.rng import fold_in
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError

Hashes = NDArray[np.uint64]


def check_apart(train: Index | tuple[str, ...], val: Index, *, few: int = 100_000) -> None:
    """DataError that names the first validation image that is a training image too.

    `train`: the index of the training data, or the shards of a stream.
    Symbolic links of folders are followed. Symbolic and hard links of single files are followed in
    data sets of up to `few` files only, since it takes minutes on a file server; `trainyard data
    verify` follows them all.
    """
    follow = isinstance(train, Index) and max(map(_count, (train, val))) <= few
    if not isinstance(train, Index):
        shared = _rows_in_files(val, train)
    elif (
        not follow
        and {train.format, val.format} == {"folder"}
        and not _real_folders(train) & _real_folders(val)
    ):
        return  # no folder is in both: this reads no file names
    else:
        shared = same_samples(train, val, follow=follow)
    if len(shared):
        file, offset, _ = val.locate(int(shared[0]))
        raise DataError(
            "data.val-in-train",
            "{num_shared:,} of {num_images:,} validation images are training images too, the "
            "first in {path} at byte {offset}: give each split data of its own by --data.train "
            "and --data.val",
            num_shared=len(shared),
            num_images=len(val),
            path=file,
            offset=offset,
        )


def same_samples(train: Index, val: Index, *, follow: bool = True) -> Ints:
    """The rows of `val` at the same place of the same file as a row of `train`.

    `follow`: links of files are followed; links of folders always are.
    """
    if not _kinds(train) & _kinds(val):
        return np.empty(0, np.int64)
    shared: Ints = np.flatnonzero(
        np.isin(_sample_hashes(val, follow), _sample_hashes(train, follow))
    )
    return shared


def check_once(parts: Sequence[Index], locations: Sequence[str], *, few: int = 100_000) -> None:
    """DataError for an image that two of several data sets have; `few`: see `check_apart`."""
    follow = sum(map(_count, parts)) <= few
    seen = np.empty(0, np.uint64)
    for part, location in zip(parts, locations, strict=True):
        hashes = _sample_hashes(part, follow)
        if len(shared := np.flatnonzero(np.isin(hashes, seen))):
            raise DataError(
                "data.image-in-two-locations",
                "{location}: {num_shared:,} of its images are in a location before it too, the "
                "first in {path}: name each image once; data.weights draws a location more often",
                location=location,
                num_shared=len(shared),
                path=part.locate(int(shared[0]))[0],
            )
        seen = np.concatenate([seen, hashes])


def _sample_hashes(index: Index, follow: bool) -> Hashes:
    """A hash of each sample's file and place in it, equal for each name of the file."""
    files = hash_names(_real_paths(index, follow))
    return fold_in(0, files[index.file].view(np.int64), index.keys_in_file)


def hash_names(texts: Iterable[str]) -> Hashes:
    """A 64-bit hash of each text, so that fourteen million names need no Python objects."""
    digests = (hashlib.blake2b(os.fsencode(text), digest_size=8).digest() for text in texts)
    numbers = (int.from_bytes(digest, sys.byteorder) for digest in digests)
    return np.fromiter(numbers, np.uint64)


def _kinds(index: Index) -> set[str]:
    """The kinds of an index's files; a merged index may have several.

    Images that `predict` was given by name are of no format.
    """
    of = formats.all_formats()
    names = index.format.split(" and ")
    return {(of[name].kind or name) if name in of else "image" for name in names}


def _count(index: Index) -> int:
    return len(index.file_names)


def _real_folders(index: Index) -> set[str]:
    """All folders that images can lie in: the folders that the index watches, links followed."""
    # Names with .. are folders of other splits, watched for their classes.
    names = (name for name in index.stamps if ".." not in name.split(os.sep))
    return {os.path.realpath(os.path.join(index.root, name)) for name in names}


def _rows_in_files(val: Index, files: Iterable[str]) -> Ints:
    known = hash_names(path if is_remote(path) else _real_file(path) for path in files)
    return np.flatnonzero(np.isin(hash_names(_real_paths(val, follow=True)), known)[val.file])


def _real_paths(index: Index, follow: bool) -> Iterator[str]:
    real_folder = cache(os.path.realpath)
    for row in range(_count(index)):
        path = os.path.join(index.root, index.file_names[row])
        if is_remote(path):
            yield path
        elif follow:
            yield _real_file(path, real_folder)
        else:
            folder, name = os.path.split(path)
            yield os.path.join(real_folder(folder), name)


def _real_file(path: str, real_folder: Callable[[str], str] = os.path.realpath) -> str:
    """The path of a file without links; a file with several names is its device and inode."""
    with suppress(OSError):  # a file that is away has its path alone
        stat = os.lstat(path)
        if S_ISLNK(stat.st_mode):
            path = os.path.realpath(path)
            stat = os.stat(path)
        # Inodes are compared for these alone: some file systems have numbers that change.
        if stat.st_nlink > 1:
            return f"{stat.st_dev}:{stat.st_ino}"
    folder, name = os.path.split(path)
    return os.path.join(real_folder(folder), name)
