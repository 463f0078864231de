"""Groups of images, such as those of a patient, which stay on one side of a division.

`data.group` is a column of a list, or else a regular expression of the path: its groups in
parentheses together, or all that it matches, name an image's group. An image whose path it does not
match is a group by itself.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainyard.data import formats
from trainyard.data.arrays import Ints
from trainyard.data.index.overlap import hash_names
from trainyard.data.index.table import Index
from trainyard.data.storage.location import find_place
from trainyard.errors import DataError
from trainyard.printable import print_line


class Groups(NamedTuple):
    of: Ints
    """The number of each sample's group: int64[samples]."""
    keys: Ints
    """A hash of each group's name, the same on every machine: int64[groups]."""


def find_groups(index: Index, location: str, group: str) -> Groups:
    """The groups of a data set. DataError if they divide nothing."""
    cells_of = formats.all_formats()[index.format].cells
    cells = cells_of(find_place(location), group) if cells_of else None
    names = [*index.file_names]
    found = [cells[name] or None for name in names] if cells else _matches(group, names)
    named, others = {name for name in found if name}, sum(name is None for name in found)
    if not named or len(named) == len(index) or len(named) + others < 2:
        raise DataError(
            "data.group-divides-nothing",
            "{location}: data.group = {group!r} {what}: name a column of a list, or write a "
            "regular expression for paths such as {path}",
            location=location,
            group=group,
            what=_what(len(named), len(index)),
            path=names[0],
        )
    rest = f"; the {others:,} others are groups by themselves" if others else ""
    count = f"{len(named):,} groups of {len(found) - others:,} files"
    print_line(f"{location}: data.group makes {count}{rest}")
    # A path has no null character: no group is called like an image.
    texts = (f"\0{own}" if name is None else name for own, name in zip(names, found, strict=True))
    keys, of_file = np.unique(hash_names(texts).view(np.int64), return_inverse=True)
    return Groups(of_file[index.file], keys)


def _matches(group: str, names: Sequence[str]) -> list[str | None]:
    """The name of the group of each path; None where the expression does not match."""
    pattern = re.compile(group)
    matches = map(pattern.search, names)
    return [match and ("/".join(match.groups("")) or match[0] or None) for match in matches]


def _what(groups: int, count: int) -> str:
    """What is wrong with so many groups of images."""
    if groups in (0, 1):
        return "is the same for all images" if groups else "matches no path"
    return f"is another one for each of {count:,} images"
