"""Divides one data set into training and validation images, for data that come without a split.

Each image has a number in [0, 1), a hash of the seed, its file's path relative to the location and
its offset in the file. Of a class of n images, the round(n x share) with the lowest numbers are for
validation, at least one, and one less than n at most. So each class has its share, on every machine
and under every name of the location.

The price is that new images may push old ones over the border between the sides. Numbers below a
fixed border would move none, but give a class its share only on average: 4 +- 2 images of 40. A
stateless rule cannot be exact and also move no image, because it cannot tell which images are new.
This one moves as many as the new numbers are uneven. With a share of 0.1 and a class that grows by
a tenth, of its old images change sides, on average (at most half of them from training to
validation):

    images in the class        40     100     400    1300
    change sides, of 100      0.9     0.7     0.4     0.2

Images of a group, see `data.group`, stay together: the number is the group's, which counts for the
class of most of its images, and lies where its middle image would.

With lists of labels the numbers below the share decide: a rare class may lie on one side.

The folds 1/n to n/n cut the same order of a class into n stretches, whose sizes differ by one at
most. Where the longer ones lie depends on the class, so that all folds are of nearly the same
size.
"""

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.arrays import Bools, Floats, Ints
from trainyard.data.index.fold import read_fold
from trainyard.data.index.groups import Groups, find_groups
from trainyard.data.index.overlap import hash_names
from trainyard.data.index.table import (
    Index,
    digest_of,
    into_cache,
    load_index,
    save_index,
)
from trainyard.data.rng import fold_in, uniforms
from trainyard.errors import DataError
from trainyard.files import cache_folder


class Side(NamedTuple):
    """One side of a division."""

    split: Literal["train", "val"]
    part: float | str
    """The images that validate: their share, such as 0.1, or their fold, such as "2/5"."""
    seed: int
    group: str | None = None
    """What names the group of an image, as data.group; images of a group are on one side."""

    @property
    def key(self) -> str:
        """The recipe key of the part."""
        return "data.val_fold" if isinstance(self.part, str) else "data.val_share"

    @property
    def known(self) -> list[object]:
        """What tells this side from others: without groups as before there were any."""
        return [self.split, self.part, self.seed, *[self.group] * (self.group is not None)]


def both_sides(part: float | str, seed: int, group: str | None = None) -> tuple[Side, Side]:
    """The training and the validation side of a division."""
    return Side("train", part, seed, group), Side("val", part, seed, group)


def is_validation(index: Index, side: Side, location: str = "") -> Bools:
    """True for each sample of an index that is for validation: bool[samples].

    `location` is that of the index, for the columns of a list that name groups.
    """
    part = side.part
    if side.group is not None:
        groups = find_groups(index, location or index.root, side.group)
        numbers = uniforms(fold_in(side.seed, groups.keys), 1)[:, 0]
        if index.lists is None:
            chosen: Bools = _chosen_groups(index, groups, numbers, part)[groups.of]
            return chosen
        numbers = numbers[groups.of]
    else:
        names = hash_names(index.file_names)
        keys = fold_in(side.seed, names.view(np.int64)[index.file], index.keys_in_file)
        numbers = uniforms(keys, 1)[:, 0]
    if index.lists is not None:
        low, high = _limits(part)
        within: Bools = (low <= numbers) & (numbers < high)
        return within
    counts = np.bincount(index.label, minlength=len(index.classes))
    first, last = _stretches(counts, part)
    # The samples of a class lie in a stretch of `order`, those with the lowest numbers first.
    order = np.lexsort((numbers, index.label))
    ranks = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_chosen = np.empty(len(index), np.bool_)
    is_chosen[order] = (np.repeat(first, counts) <= ranks) & (ranks < np.repeat(last, counts))
    return is_chosen


def _chosen_groups(index: Index, groups: Groups, numbers: Floats, part: float | str) -> Bools:
    """True for each group that is for validation: bool[groups].

    A group counts for the class of most of its images, and lies where its middle image would.
    """
    count, classes = len(groups.keys), len(index.classes)
    pairs, times = np.unique(groups.of * classes + index.label, return_counts=True)
    of, label = np.divmod(pairs, classes)
    most = np.lexsort((label, -times, of))
    main = label[most][np.unique(of[most], return_index=True)[1]]
    sizes, order = np.bincount(groups.of, minlength=count), np.lexsort((numbers, main))
    images, num_groups = np.bincount(main, sizes, classes), np.bincount(main, minlength=classes)
    main, sizes = main[order], sizes[order]
    before = np.repeat(np.cumsum(images) - images, num_groups)
    middle = (np.cumsum(sizes) - sizes / 2 - before) / images[main]  # from 0 to 1 in a class
    is_chosen = np.empty(count, np.bool_)
    if isinstance(part, str):
        fold, folds = read_fold(part)
        turned = np.floor(middle * folds).astype(np.int64) + main  # few groups: not all in one fold
        is_chosen[order] = turned % folds == fold - 1
        return is_chosen
    wanted = np.bincount(main[middle < part], minlength=classes)
    wanted = np.clip(wanted, np.minimum(num_groups - 1, 1), num_groups - 1)
    ranks = np.arange(count) - np.repeat(np.cumsum(num_groups) - num_groups, num_groups)
    is_chosen[order] = ranks < wanted[main]
    return is_chosen


def _limits(part: float | str) -> tuple[float, float]:
    """The numbers of validation images, from the first to below the second."""
    if not isinstance(part, str):
        return 0.0, part
    fold, folds = read_fold(part)
    return (fold - 1) / folds, fold / folds


def _stretches(counts: Ints, part: float | str) -> tuple[NDArray[Any], NDArray[Any]]:
    """The ranks of validation images in classes of so many, from the first to below the second."""
    if not isinstance(part, str):
        wanted = np.floor(counts * part + 0.5)
        return np.zeros_like(counts), np.clip(wanted, np.minimum(counts - 1, 1), counts - 1)
    fold, folds = read_fold(part)
    shift = np.arange(len(counts)) % folds  # of `folds` equal classes, each border is the exact one
    return (counts * (fold - 1) + shift) // folds, (counts * fold + shift) // folds


def open_part(index: Index, side: Side, location: str = "") -> Index:
    """The samples of an index on one side, as an index of its own in the cache.

    `location` is that of the index, for the columns of a list that name groups.
    DataError if the cache is not writable, or one of the sides has no image.
    """
    # An index of an older release has no row numbers in its parts.
    digest = digest_of([os.path.realpath(index.path), *side.known, "rows"])
    path = cache_folder() / f"part-{digest[:16]}"
    saved = load_index(path)
    wanted = (_fingerprint(index, side), index.fingerprint)
    is_same = saved is not None and (saved.fingerprint, saved.whole) == wanted
    if saved is not None and is_same and saved.stamps == index.stamps:  # a touched file looks new
        return saved
    with into_cache(path, index.root):
        return save_part(index, side, path, location)


def save_part(index: Index, side: Side, path: Path, location: str = "") -> Index:
    """Like `open_part`, in a new file at `path`. OSError if it cannot be written."""
    chosen = is_validation(index, side, location)
    if not chosen.any() or chosen.all():
        is_share = index.lists is None and not isinstance(side.part, str)
        unit = "image" if side.group is None else "group"
        raise DataError(
            "data.too-few-to-share",
            "{location}: {reason}, so none can be kept for validation ({key} = {value}): add "
            "images, or name validation data by --data.val",
            location=index.root,
            reason=f"no class has two {unit}s" if is_share else f"it has too few {unit}s",
            key=side.key,
            value=side.part,
        )
    rows = np.flatnonzero(chosen == (side.split == "val"))
    same = (str(index.path), index.fingerprint)
    fingerprint = _fingerprint(index, side)
    header = index.header(fingerprint=fingerprint, whole=index.fingerprint, same_rows=same)
    return save_index(path, header, index.of_rows(rows) | {"row": rows})


def _fingerprint(index: Index, side: Side) -> str:
    # Other divisions of the same images were made by releases before.
    rule = "stratified" if index.snappy_start is None else "stratified by places"
    return digest_of([index.fingerprint, *side.known, rule])
