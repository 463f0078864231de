"""Plans a pack: the samples, order and name of each shard. Pure functions."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from trainyard.data.arrays import Int32s, Ints
from trainyard.data.formats import all_formats
from trainyard.data.formats.format import Shards
from trainyard.data.index.table import Index
from trainyard.data.rng import fold_in, permute
from trainyard.datasets.pack.recode import Recode
from trainyard.errors import DataError
from trainyard.hints import did_you_mean

_CHUNK = 1 << 20  # positions permuted at once, which bounds the memory
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Selection:
    """Samples of an index in the order to write them."""

    index: Index
    ids: Ints
    labels: Int32s
    """Label of each id, as a position in the classes written; with lists of labels, the number of
    its list in the index."""

    def highest(self) -> int:
        """The highest class number; 0 without a label."""
        lists = self.index.lists
        return int((self.labels if lists is None else lists.flat(self.labels)[1]).max(initial=0))


@dataclass(frozen=True)
class PackOptions:
    format: str
    name: str = "imagenet"
    shard_samples: int = 1000
    shard_bytes: int | None = None
    """Most bytes of a shard, by the images' sizes in the source."""
    recode: Recode | None = None
    workers: int = 1
    pixels: bool = False
    """True for packed records of pixels instead of coefficients."""


@dataclass(frozen=True)
class ShardJob:
    """A shard to write."""

    split: str
    name: str  # relative to the destination
    first: int  # number of its first sample in the split
    ids: Ints = field(repr=False)
    labels: Int32s = field(repr=False)


def shuffled(index: Index, seed: int | None) -> Selection:
    """All samples of an index, in an order given by the seed; None: in stored order."""
    ids = np.arange(len(index))
    if seed is not None:
        for start in range(0, len(ids), _CHUNK):
            part = ids[start : start + _CHUNK]
            ids[start : start + _CHUNK] = permute(
                part, fold_in(seed, np.zeros_like(part)), len(index)
            )
    return Selection(index, ids, index.label[ids])


def only_classes(selection: Selection, keep: Ints) -> Selection:
    """The samples of some classes (sorted positions), which are renumbered from 0."""
    if selection.index.lists is not None:
        raise DataError(
            "pack.classes-with-lists",
            "some classes alone can be packed of images with one label each only",
        )
    new = np.full(len(selection.index.classes), -1, np.int32)
    new[keep] = np.arange(len(keep))
    labels = new[selection.labels]
    return Selection(selection.index, selection.ids[labels >= 0], labels[labels >= 0])


def plan_jobs(splits: dict[str, Selection], options: PackOptions) -> dict[str, list[ShardJob]]:
    """The shards of each split. DataError for options that cannot be used."""
    if not _NAME.fullmatch(options.name):
        raise DataError(
            "pack.malformed-name",
            "the name {name!r} is not of letters, digits, . _ and - alone",
            name=options.name,
        )
    shards = written_as(options.format)
    if options.pixels and options.format != "packed":
        raise DataError(
            "pack.format-without-pixels",
            "{format}: holds no raw pixels; choose the format packed",
            format=options.format,
        )
    if options.shard_samples < 1 or (options.shard_bytes or 1) < 1:
        raise DataError("pack.empty-shard", "a shard needs at least one sample and one byte")
    jobs = {}
    for split, selection in splits.items():
        if not len(selection.ids):
            raise DataError("pack.no-samples", "{split}: no samples to pack", split=split)
        if selection.index.lists is not None and not shards.holds_lists:
            raise DataError(
                "pack.format-without-lists",
                "{format}: holds one label for each image, and {split} has lists of labels; "
                "choose {names}",
                format=options.format,
                split=split,
                names=" or ".join(name for name, one in _written().items() if one.holds_lists),
            )
        borders = _borders(selection, options)
        names = shard_names(options, split, len(borders) - 1)
        jobs[split] = [
            ShardJob(split, name, start, selection.ids[start:stop], selection.labels[start:stop])
            for name, (start, stop) in zip(names, pairwise(borders), strict=True)
        ]
    return jobs


def _borders(selection: Selection, options: PackOptions) -> list[int]:
    """The borders of shards, each of at least one sample."""
    count = len(selection.ids)
    if options.shard_bytes is None:
        return [*range(0, count, options.shard_samples), count]
    ends = np.cumsum(selection.index.size[selection.ids])
    borders = [0]
    while (start := borders[-1]) < count:
        before = int(ends[start - 1]) if start else 0
        fitting = int(np.searchsorted(ends, before + options.shard_bytes, "right"))
        borders.append(min(max(fitting, start + 1), start + options.shard_samples, count))
    return borders


def shard_names(options: PackOptions, split: str, count: int) -> list[str]:
    """The names of all shards of a split, relative to the destination."""
    before, width, after = _parts(options, split, count)
    return [f"{before}{number:0{width}d}{after}" if width else before for number in range(count)]


def brace_list(options: PackOptions, split: str, count: int) -> str:
    """The location of a split, relative to the destination."""
    if options.format == "folder":
        return split
    names = shard_names(options, split, count)
    if count == 1:
        return names[0]
    before, width, after = _parts(options, split, count)
    return f"{before}{{{0:0{width}d}..{count - 1:0{width}d}}}{after}"


def _parts(options: PackOptions, split: str, count: int) -> tuple[str, int, str]:
    """The parts of a shard's name: text before its number, digits, and text after it."""
    return written_as(options.format).name(options.name, split, count)


def _written() -> dict[str, Shards]:
    return {name: each.shards for name, each in all_formats().items() if each.shards}


def written_as(format: str) -> Shards:
    """How a format is written. DataError if it cannot be."""
    written = _written()
    if format not in written:
        raise DataError(
            "pack.unknown-format",
            "{format}: cannot be written; choose {names}",
            format=format,
            names=", ".join(written),
        )
    return written[format]


def choose_classes(
    wish: str, classes: Sequence[str] | None, count: int, seed: int
) -> tuple[Ints, tuple[str, ...]]:
    """Sorted positions and names of the classes in `wish`: "N" at random, a file, or "A,B".

    If the `count` classes have no names, their numbers become names, since they are renumbered.
    """
    width = len(str(count - 1))
    names = tuple(classes or (f"{number:0{width}d}" for number in range(count)))
    if wish.isdecimal() and wish in (classes or ()):
        raise DataError(
            "pack.ambiguous-classes",
            "--classes {value}: a class has this name: write {value}, for it alone, and 0{value} "
            "for {value} classes at random",
            value=wish,
        )
    if wish.isdecimal():
        keep = _at_random(int(wish), count, seed)
    else:
        known = {name: number for number, name in enumerate(names)}
        if classes is None:  # 7 as well as 007
            known |= {str(number): number for number in range(count)}
        keep = np.array(sorted({_find(name, known) for name in _listed(wish)}), np.int64)
    return keep, tuple(names[number] for number in keep.tolist())


def _at_random(wanted: int, count: int, seed: int) -> Ints:
    if not 0 < wanted <= count:
        raise DataError(
            "pack.too-few-classes",
            "{num_wanted} classes were asked for, but the data has {num_classes:,}",
            num_wanted=wanted,
            num_classes=count,
        )
    positions = np.arange(count)
    return np.sort(permute(positions, fold_in(seed, np.ones_like(positions)), count)[:wanted])


def _listed(wish: str) -> list[str]:
    text = Path(wish).read_text() if os.path.isfile(wish) else wish.replace(",", "\n")
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        raise DataError(
            "pack.no-classes-named",
            "{value!r} names no classes; give a number, a file of names, or A,B,…",
            value=wish,
        )
    return names


def _find(name: str, known: dict[str, int]) -> int:
    if name not in known:
        raise DataError(
            "pack.unknown-class",
            "there is no class {name!r}{hint}",
            name=name,
            hint=did_you_mean(name, known),
        )
    return known[name]
