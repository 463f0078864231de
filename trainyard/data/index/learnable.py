"""Data that cannot be learnt from, or hardly: one class, and classes without images of a split."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from trainyard.data.formats.remedies import remedy_beside
from trainyard.data.index.label_space import first_of, name_remarks
from trainyard.data.index.layout import doubtful_names
from trainyard.data.index.table import Index
from trainyard.errors import DataError


def check_learnable(train: Index, where: str) -> None:
    """DataError for training images that are all of one class."""
    counts = train.samples_per_class()
    if train.lists is None and np.count_nonzero(counts) < 2:
        name = train.classes[int(counts.argmax())]
        raise DataError(
            "data.one-class",
            "{location}: 1 class, {name!r}: there is nothing to learn: name the folder above "
            "those of the classes, or give each class a label{hint}",
            location=where,
            name=name,
            hint=remedy_beside(train.root, train.left_out),
        )


def class_remarks(
    train: Index, val: Index | None, numbers: Sequence[int] | None = None
) -> list[str]:
    """Remarks about classes of the training data and, if there are any, of the validation data.

    `numbers`: the training class of each validation class; the same numbers by default.
    """
    counts = train.samples_per_class()
    remarks = [*_lacking(train.classes, counts == 0, "training")]
    if val is not None:
        validated = np.zeros_like(counts)
        of_val = val.samples_per_class()
        validated[range(len(of_val)) if numbers is None else numbers] = of_val
        remarks += _lacking(train.classes, (validated == 0) & (counts > 0), "validation")
    if train.lists is not None:
        everywhere = [
            name for name, n in zip(train.classes, counts, strict=True) if n == len(train)
        ]
        if everywhere:
            remarks.append(f"all training images have the label {first_of(everywhere)}")
    remarks += name_remarks(train.classes) if train.has_names else []
    # Of folders it is told before they are indexed.
    if train.format == "tar" and (reason := doubtful_names(train.classes)):
        remarks.append(f"{train.root}: classes {first_of(train.classes)}, though {reason}")
    inside = _folders_inside(train)
    if (flat := [name for name in inside if not inside[name]]) and (
        deep := [name for name in inside if len(inside[name]) > 1]
    ):
        remarks.append(
            f"{train.root}: class {deep[0]!r} is of the folders "
            f"{first_of(sorted(inside[deep[0]]))}, and {flat[0]!r} has none inside: if these are "
            f"classes, name {deep[0]!r} as the location"
        )
    if shared := _shared(inside):
        remarks.append(
            f"{train.root}: its classes {first_of(train.classes)} hold the same folders, "
            f"{first_of(shared)}: if these are the classes, name the folder above them as the "
            "location; #classes=path makes a class of each path, #classes=name of each name"
        )
    return remarks


def _lacking(classes: Sequence[str], lacks: Iterable[bool], what: str) -> Iterator[str]:
    names = [name for name, is_without in zip(classes, lacks, strict=True) if is_without]
    if names:
        noun = "class has" if len(names) == 1 else "classes have"
        yield f"{len(names):,} {noun} no {what} images: {first_of(names)}"


def _folders_inside(index: Index) -> dict[str, set[str]]:
    """The names of the folders in each class of image folders."""
    inside: dict[str, set[str]] = {name: set() for name in index.classes}
    for path in index.stamps if index.format == "folder" else ():
        above, _, name = path.partition(os.sep)
        if name and os.sep not in name and above in inside:
            inside[above].add(name)
    return inside


def _shared(inside: Mapping[str, set[str]]) -> list[str]:
    """The folders, two or more, that every class holds."""
    shared = set.intersection(*inside.values()) if len(inside) > 1 else set()
    return sorted(shared) if len(shared) > 1 else []
