"""Merges several data sets: unites their classes by name, and concatenates their samples.

The merged index is an ordinary index file in the cache, with absolute file names; the data sets
are not changed.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.data.formats.left_out import LeftOut
from trainyard.data.index.build import Progress, open_index
from trainyard.data.index.label_lists import LabelLists
from trainyard.data.index.label_space import match_classes, report, unite_classes
from trainyard.data.index.splits import find_splits, train_and_val
from trainyard.data.index.table import Chunks, Index, load_index, write_index
from trainyard.data.index.val_share import Side, open_part
from trainyard.data.storage.location import take_secrets
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError
from trainyard.files import cache_folder

_ROWS = 1 << 14  # rows copied at a time; their file names take about 1 kB each to move


def merged_splits(
    locations: Sequence[str], *, may_share: bool = False
) -> dict[str, str | list[str] | None]:
    """The train and val locations of one data set, or of several.

    Each of several must have train data, and at least one val data; all val data is used. For
    `may_share` see `train_and_val`.
    """
    locations = [take_secrets(location) for location in locations]
    if len(locations) == 1:
        return dict(train_and_val(locations[0], may_share=may_share))
    found = [find_splits(location) for location in locations]
    if may_share:
        found = [splits or {"train": place} for place, splits in zip(locations, found, strict=True)]
    for location, splits in zip(locations, found, strict=True):
        if "train" not in splits:
            raise DataError(
                f"{location}: has no train data, which each of several --data must have; or name "
                "the parts by --data.train and --data.val"
            )
    val = [splits["val"] for splits in found if "val" in splits]
    if not val and not may_share:
        raise DataError(
            f"none of {', '.join(locations)} has val data: add a data set that has it, or name "
            "one with --data.val, or take a share of the train data by --data.val_share 0.1"
        )
    return {"train": [splits["train"] for splits in found], "val": val or None}


def validation_splits(locations: Sequence[str]) -> list[str]:
    """The val locations of data sets; a data set without splits is taken whole."""
    locations = [take_secrets(location) for location in locations]
    found = [find_splits(location) or {"val": location} for location in locations]
    val = [splits["val"] for splits in found if "val" in splits]
    if not val:
        raise DataError(f"{' and '.join(locations)}: no val data in it, but train data")
    return val


def open_merged(
    locations: Sequence[str],
    known: Sequence[str] | None,
    progress: Progress = lambda *_: None,
    side: Side | None = None,
) -> Index:
    """The index of one location, or of several merged; with `side`, of a part of each.

    Labels are numbers among the `known` classes. DataError for a class that is none of them.
    """
    parts: list[Index] = []
    for location in locations:
        done = sum(map(len, parts))
        whole = open_index(location, _counting_from(done, progress))
        parts.append(whole if side is None else open_part(whole, side))
    if len(parts) == 1 and known is None:
        return parts[0]
    classes = _unite(locations, parts, known)
    if len(parts) == 1 and tuple(classes) == parts[0].classes:
        return parts[0]
    path, header = _path(parts, known), _header(parts, classes)
    saved = load_index(path)
    same = ("fingerprint", "stamps")  # a copied or touched file is the same data, but looks new
    if saved is not None and all(getattr(saved, key) == header[key] for key in same):
        return saved
    return _save(path, parts, header)


def _counting_from(done: int, progress: Progress) -> Progress:
    return lambda count, files=None: progress(done + count, files)


def _unite(
    locations: Sequence[str], parts: Sequence[Index], known: Sequence[str] | None
) -> list[str]:
    """The `known` names of classes, or those of all parts.

    DataError for a class that is none of these, and where lists of labels meet single ones.
    """
    kinds = {part.lists is None: place for place, part in zip(locations, parts, strict=True)}
    if len(kinds) > 1:
        raise DataError(
            f"{kinds[False]} has lists of labels and {kinds[True]} one label for each image: they "
            "cannot be merged"
        )
    if known is None:
        known = unite_classes((part.classes, part.has_names) for part in parts)
    for place, part in zip(locations, parts, strict=True):
        report(match_classes(known, part.classes, place, has_names=part.has_names))
    return list(known)


def _path(parts: Sequence[Index], known: Sequence[str] | None) -> Path:
    identity = [[os.path.realpath(part.path) for part in parts], known and list(known)]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return cache_folder() / f"merged-{digest[:16]}"


def _root(part: Index) -> str:
    return part.root if is_remote(part.root) else os.path.realpath(part.root)


def _header(parts: Sequence[Index], classes: list[str]) -> dict[str, Any]:
    identity = [classes, [part.fingerprint for part in parts]]
    left_out = LeftOut()
    for part in parts:
        left_out.update(part.left_out)
    return {
        "root": None,
        "format": " and ".join(sorted({part.format for part in parts})),
        "classes": classes,
        "has_names": any(part.has_names for part in parts)
        or classes != [str(number) for number in range(len(classes))],
        "stamps": {
            os.path.join(_root(part), name): stamp
            for part in parts
            for name, stamp in part.stamps.items()
        },
        "fingerprint": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        "left_out": left_out.kinds,
        "parts": [len(part) for part in parts],
    }


def _save(path: Path, parts: Sequence[Index], header: dict[str, Any]) -> Index:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_index(path, header, _columns(parts, header["classes"]))
    except OSError as error:
        raise DataError(
            f"the index of the merged data cannot be written to {path} ({error.strerror}); set "
            "TRAINYARD_CACHE to a writable folder"
        ) from None
    saved = load_index(path)
    assert saved is not None
    return saved


# --- the columns, a piece at a time ---


def _columns(parts: Sequence[Index], classes: list[str]) -> dict[str, Chunks]:
    rows, files = sum(map(len, parts)), sum(len(part.file_names) for part in parts)
    prefixes = [os.fsencode(os.path.join(_root(part), "")) for part in parts]
    text = sum(
        len(part.file_names.text) + len(prefix) * len(part.file_names)
        for part, prefix in zip(parts, prefixes, strict=True)
    )
    optional = {name for part in parts for name in part.optional_columns()}
    return {
        **{
            name: Chunks(np.dtype("<i4"), rows, _pieces(_or_zeros(parts, name)))
            for name in sorted(optional)
        },
        "file": Chunks(np.dtype("<i4"), rows, _file_numbers(parts)),
        "offset": Chunks(np.dtype("<i8"), rows, _pieces(part.offset for part in parts)),
        "size": Chunks(np.dtype("<i8"), rows, _pieces(part.size for part in parts)),
        "label": Chunks(np.dtype("<i4"), rows, _labels(parts, classes)),
        "file_name_text": Chunks(np.dtype("u1"), text, _names(parts, prefixes)),
        "file_name_ends": Chunks(np.dtype("<i8"), files, _name_ends(parts, prefixes)),
        **_list_columns([part.lists for part in parts if part.lists is not None], parts, classes),
    }


def _pieces(columns: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    for column in columns:
        for start in range(0, len(column), _ROWS):
            yield column[start : start + _ROWS]


def _or_zeros(parts: Sequence[Index], name: str) -> Iterator[NDArray[Any]]:
    """An optional column of each part; zeros for a part without it."""
    for part in parts:
        yield part.optional_columns().get(name, np.zeros(len(part), "<i4"))


def _file_numbers(parts: Sequence[Index]) -> Iterator[NDArray[Any]]:
    first = 0
    for part in parts:
        for piece in _pieces([part.file]):
            yield piece + np.int32(first)
        first += len(part.file_names)


def _labels(parts: Sequence[Index], classes: list[str]) -> Iterator[NDArray[Any]]:
    """The numbers of classes among the united ones, or of lists among those of all parts."""
    first = 0
    for part in parts:
        if part.lists is not None:
            yield from (piece + np.int32(first) for piece in _pieces([part.label]))
            first += len(part.lists.ends)
        else:
            yield from _renumbered(part.label, part, classes)


def _renumbered(
    labels: NDArray[np.int32], part: Index, classes: list[str]
) -> Iterator[NDArray[Any]]:
    match = match_classes(classes, part.classes, part.root, has_names=part.has_names)
    numbers = np.array(match.numbers, "<i4")
    yield from (numbers[piece] for piece in _pieces([labels]))


def _list_columns(
    lists: Sequence[LabelLists], parts: Sequence[Index], classes: list[str]
) -> dict[str, Chunks]:
    """The columns of the lists of all parts; none without lists."""
    if not lists:
        return {}
    firsts = np.cumsum([0, *(len(one.values) for one in lists)]).tolist()
    ends = (
        p + first for one, first in zip(lists, firsts, strict=False) for p in _pieces([one.ends])
    )
    values = (
        piece
        for part, one in zip(parts, lists, strict=True)
        for piece in _renumbered(one.values, part, classes)
    )
    return {
        "list_ends": Chunks(np.dtype("<i8"), sum(len(one.ends) for one in lists), ends),
        "list_values": Chunks(np.dtype("<i4"), firsts[-1], values),
    }


def _names(parts: Sequence[Index], prefixes: Sequence[bytes]) -> Iterator[NDArray[Any]]:
    """The file names end to end, each with its folder as a prefix."""
    for part, prefix in zip(parts, prefixes, strict=True):
        start = 0
        for ends in _pieces([part.file_names.ends]):
            lengths = np.diff(ends, prepend=start)
            names = part.file_names.text[start : ends[-1]]
            count, size = len(ends), len(prefix)
            full = np.empty(len(names) + count * size, "u1")
            moved = np.arange(len(names)) + size * (1 + np.repeat(np.arange(count), lengths))
            full[moved] = names
            begins = ends - lengths - start + size * np.arange(count)
            full[begins[:, None] + np.arange(size)] = np.frombuffer(prefix, "u1")
            yield full
            start = ends[-1]


def _name_ends(parts: Sequence[Index], prefixes: Sequence[bytes]) -> Iterator[NDArray[Any]]:
    end = 0
    for part, prefix in zip(parts, prefixes, strict=True):
        files = 0
        for ends in _pieces([part.file_names.ends]):
            yield end + ends + len(prefix) * (files + 1 + np.arange(len(ends)))
            files += len(ends)
        end += len(part.file_names.text) + len(prefix) * files
