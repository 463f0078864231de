"""Merges several data sets: unites their classes by name, and concatenates their samples.

The merged index is an ordinary index file in the cache, with absolute file names; the data sets
are not changed.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from trainyard.data.formats.left_out import LeftOut
from trainyard.data.index.build import Progress, open_index
from trainyard.data.index.label_lists import LabelLists
from trainyard.data.index.label_space import match_classes, plain_names, report, unite_classes
from trainyard.data.index.layout import check_classes
from trainyard.data.index.overlap import check_once
from trainyard.data.index.splits import find_splits, train_and_val, without_splits
from trainyard.data.index.table import (
    DTYPES,
    Columns,
    Index,
    digest_of,
    into_cache,
    load_index,
    save_index,
)
from trainyard.data.index.val_share import Side, open_part
from trainyard.data.storage.location import take_secrets
from trainyard.data.storage.source import real_path
from trainyard.errors import DataError
from trainyard.files import cache_folder

_CONCATENATED = {"offset", "size", "snappy_start", "snappy_length"}


def merged_splits(
    locations: Sequence[str], *, may_share: bool = False
) -> dict[str, str | list[str] | None]:
    """The train and val locations of one data set, or of several.

    Each of several must have train data, and at least one val data; all val data is used. For
    `may_share` see `train_and_val`. DataError for folders that are hardly classes.
    """
    found = _merged_splits([take_secrets(location) for location in locations], may_share)
    train, val = found["train"], found["val"]
    rest = f"--data.val {shlex.quote(val)}" if isinstance(val, str) else "--data.val_share 0.1"
    for location in [train] if isinstance(train, str) else train or ():
        check_classes(location, rest)
    return found


def _merged_splits(locations: Sequence[str], may_share: bool) -> dict[str, str | list[str] | None]:
    if len(locations) == 1:
        return dict(train_and_val(locations[0], may_share=may_share))
    found = [find_splits(location) for location in locations]
    if may_share:
        found = [
            splits or {"train": without_splits(location)}
            for location, splits in zip(locations, found, strict=True)
        ]
    for location, splits in zip(locations, found, strict=True):
        if "train" not in splits:
            raise DataError(
                "data.no-train-split",
                "{location}: has no train data, which each of several --data must have; or name "
                "the parts by --data.train and --data.val",
                location=location,
            )
    val = [splits["val"] for splits in found if "val" in splits]
    if not val and not may_share:
        raise DataError(
            "data.no-val-split",
            "none of {locations} has val data: add a data set that has it, or name one with "
            "--data.val, or take a share of the train data by --data.val_share 0.1",
            locations=", ".join(locations),
        )
    return {"train": [splits["train"] for splits in found], "val": val or None}


def validation_splits(locations: Sequence[str]) -> list[str]:
    """The val locations of data sets; a data set without splits is taken whole."""
    locations = [take_secrets(location) for location in locations]
    found = [find_splits(location) or {"val": without_splits(location)} for location in locations]
    val = [splits["val"] for splits in found if "val" in splits]
    if not val:
        raise DataError(
            "data.only-train-split",
            "{locations}: no val data in it, but train data",
            locations=" and ".join(locations),
        )
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
        parts.append(whole if side is None else open_part(whole, side, location))
    if len(parts) == 1 and known is None:
        return parts[0]
    classes = _unite(locations, parts, known)
    if len(parts) == 1 and tuple(classes) == parts[0].classes:
        return parts[0]
    path, header = _path(parts, known), _header(parts, classes)
    saved = load_index(path)
    # A copied or touched file is the same data, but looks new.
    same = ("fingerprint", "stamps", "whole")
    if saved is not None and all(getattr(saved, key) == header[key] for key in same):
        return saved
    check_once(parts, locations)
    return _save(path, parts, header)


def _counting_from(done: int, progress: Progress) -> Progress:
    return lambda count, files=None: progress(done + count, files)


def _unite(
    locations: Sequence[str], parts: Sequence[Index], known: Sequence[str] | None
) -> list[str]:
    """The `known` names of classes, or those of all parts.

    DataError for a class that is none of these, and where lists of labels meet single ones.
    """
    kinds = {part.lists is None: location for location, part in zip(locations, parts, strict=True)}
    if len(kinds) > 1:
        raise DataError(
            "data.mixed-locations",
            "{location} has lists of labels and {other} one label for each image: they cannot be "
            "merged",
            location=kinds[False],
            other=kinds[True],
        )
    if known is None:
        known = unite_classes((part.classes, part.has_names) for part in parts)
        plain_names(known, " and ".join(locations))
    for location, part in zip(locations, parts, strict=True):
        report(match_classes(known, part.classes, location, has_names=part.has_names))
    return list(known)


def _path(parts: Sequence[Index], known: Sequence[str] | None) -> Path:
    # Of releases before, an index may have images twice.
    identity = [[os.path.realpath(part.path) for part in parts], known and list(known), "once"]
    return cache_folder() / f"merged-{digest_of(identity)[:16]}"


def _header(parts: Sequence[Index], classes: list[str]) -> dict[str, Any]:
    fingerprint = digest_of([classes, [part.fingerprint for part in parts]])
    numbers = list(map(str, range(len(classes))))
    has_names = any(part.has_names for part in parts) or classes != numbers
    common = {"classes": classes, "has_names": has_names, "fingerprint": fingerprint}
    if len(parts) == 1:
        return parts[0].header(**common, same_rows=parts[0].scanned)
    wholes = [part.whole for part in parts]
    left_out = LeftOut()
    for part in parts:
        left_out.update(part.left_out)
    return common | {
        "root": None,
        "format": " and ".join(sorted({part.format for part in parts})),
        "stamps": {
            os.path.join(real_path(part.root), name): stamp
            for part in parts
            for name, stamp in part.stamps.items()
        },
        "left_out": left_out.kinds,
        "parts": [*map(len, parts)],
        "whole": digest_of(wholes) if any(wholes) else "",
    }


def _save(path: Path, parts: Sequence[Index], header: dict[str, Any]) -> Index:
    with into_cache(path, " and ".join(real_path(part.root) for part in parts)):
        return save_index(path, header, _columns(parts, header["classes"]))


# --- the columns ---


def _columns(parts: Sequence[Index], classes: list[str]) -> Columns:
    labels = _labels(parts, classes)
    if len(parts) == 1:
        return parts[0].columns | labels
    names = {name for part in parts for name in part.columns} & _CONCATENATED
    texts, ends = zip(*map(_full_names, parts), strict=True)
    columns = {
        name: np.concatenate([p.columns.get(name, np.zeros(len(p), DTYPES[name])) for p in parts])
        for name in names
    }
    return columns | {
        "file": _shifted([part.file for part in parts], [len(part.file_names) for part in parts]),
        "file_name_text": np.concatenate(texts),
        "file_name_ends": _shifted(ends, [len(text) for text in texts]),
        **labels,
    }


def _shifted(columns: Sequence[NDArray[Any]], counts: Sequence[int]) -> NDArray[Any]:
    """Columns of positions end to end, each after the positions counted before it."""
    firsts = np.cumsum([0, *counts])
    shifted = (
        column + column.dtype.type(first) for column, first in zip(columns, firsts, strict=False)
    )
    return np.concatenate([*shifted])


def _labels(parts: Sequence[Index], classes: list[str]) -> Columns:
    """The numbers of classes among the united ones, or of lists among those of all parts."""
    numbers = []
    for part in parts:
        match = match_classes(classes, part.classes, part.root, has_names=part.has_names)
        numbers.append(np.array(match.numbers, "<i4"))
    lists = [part.lists for part in parts]
    if None in lists:
        labels = (new[part.label] for new, part in zip(numbers, parts, strict=True))
        return {"label": np.concatenate([*labels])}
    some = cast(list[LabelLists], lists)
    values = (new[one.values] for new, one in zip(numbers, some, strict=True))
    return {
        "label": _shifted([part.label for part in parts], [len(one.ends) for one in some]),
        "list_ends": _shifted([one.ends for one in some], [len(one.values) for one in some]),
        "list_values": np.concatenate([*values]),
    }


def _full_names(part: Index) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The text of a part's file names, each after its folder, and their ends."""
    text, ends = part.file_names.text, part.file_names.ends
    prefix = os.fsencode(os.path.join(real_path(part.root), ""))
    before = len(prefix) * np.arange(len(ends))
    starts = before + np.concatenate([[0], ends[:-1]])
    full = np.empty(len(text) + len(prefix) * len(ends), np.uint8)
    is_own = np.ones(len(full), bool)
    for position, byte in enumerate(prefix):
        full[starts + position] = byte
        is_own[starts + position] = False
    full[is_own] = text
    return full, ends + before + len(prefix)
