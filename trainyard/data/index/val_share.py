"""Divides one data set into training and validation images, for data that come without a split.

Each image has a number in [0, 1), a hash of the seed, its file's path relative to the location and
its offset in the file. Of a class of n images, the round(n x share) with the lowest numbers are for
validation, at least one, and one less than n at most. So each class has its share, on every machine
and under every name of the location.

The price is that new images may push old ones over the border between the sides. Numbers below a
fixed border would move none, but give a class its share only on average: 4 +- 2 images of 40. No
rule without a memory is exact and moves none: it cannot tell which images are new. This one moves
as many as the new numbers are uneven. With a share of 0.1 and a class that grows by a tenth, of its
old images change sides, on average (at most half of them from training to validation):

    images in the class        40     100     400    1300
    change sides, of 100      0.9     0.7     0.4     0.2

With lists of labels the numbers below the share decide: a rare class may lie on one side.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.index.overlap import hash_names
from trainyard.data.index.table import Index, load_index, save_index
from trainyard.data.rng import fold_in, uniforms
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError
from trainyard.files import cache_folder


class Side(NamedTuple):
    """One side of a division; `share` is that of the validation images."""

    split: Literal["train", "val"]
    share: float
    seed: int


def is_validation(index: Index, share: float, seed: int) -> NDArray[np.bool_]:
    """True for each sample of an index that is for validation: bool[samples]."""
    names = hash_names(index.file_names)
    keys = fold_in(seed, names.view(np.int64)[index.file], np.asarray(index.offset))
    numbers = uniforms(keys, 1)[:, 0]
    if index.lists is not None:
        below: NDArray[np.bool_] = numbers < share
        return below
    counts = np.bincount(index.label, minlength=len(index.classes))
    wanted = np.clip(np.floor(counts * share + 0.5), np.minimum(counts - 1, 1), counts - 1)
    # The samples of a class lie in a stretch of `order`, those with the lowest numbers first.
    order = np.lexsort((numbers, index.label))
    ranks = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.empty(len(index), np.bool_)
    found[order] = ranks < np.repeat(wanted, counts)
    return found


def open_part(index: Index, side: Side) -> Index:
    """The samples of an index on one side, as an index of its own in the cache.

    DataError if the cache is not writable, or no class has two images.
    """
    identity = [os.path.realpath(index.path), *side]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    path = cache_folder() / f"part-{digest[:16]}"
    saved = load_index(path)
    is_same = saved is not None and saved.fingerprint == _fingerprint(index, side)
    if saved is not None and is_same and saved.stamps == index.stamps:  # a touched file looks new
        return saved
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return save_part(index, side, path)
    except OSError as error:
        raise DataError(
            "index.unwritable",
            location=index.root,
            path=path,
            reason=error.strerror,
        ) from None


def save_part(index: Index, side: Side, path: Path) -> Index:
    """Like `open_part`, in a new file at `path`. OSError if it cannot be written."""
    chosen = is_validation(index, side.share, side.seed)
    if not chosen.any() or chosen.all():
        why = "no class has two images" if index.lists is None else "it has too few images"
        raise DataError("data.too-few-to-share", location=index.root, reason=why, value=side.share)
    rows = np.flatnonzero(chosen == (side.split == "val"))
    names = index.file_names
    columns = {name: getattr(index, name)[rows] for name in ("file", "offset", "size", "label")}
    columns |= {name: column[rows] for name, column in index.optional_columns().items()}
    columns |= {"file_name_text": names.text, "file_name_ends": names.ends}
    columns |= index.list_columns()
    header = {
        "root": index.root if is_remote(index.root) else os.path.realpath(index.root),
        "format": index.format,
        "classes": list(index.classes),
        "has_names": index.has_names,
        "stamps": index.stamps,
        "left_out": index.left_out.kinds,
        "fingerprint": _fingerprint(index, side),
    }
    return save_index(path, header, columns)


def _fingerprint(index: Index, side: Side) -> str:
    rule = "stratified"  # another division of the same images was made by a release before
    return hashlib.sha256(json.dumps([index.fingerprint, *side, rule]).encode()).hexdigest()
