"""The image that a cell of a list stands for: the one below a folder whose path ends in it.

`/data/upload/1/x.jpg`, `gs://bucket/1/x.jpg`, `C:\\upload\\1\\x.jpg` and the bare `x` all stand for
`images/1/x.jpg`, if no other image ends so. The longest end decides. A cell that names no image can
name a folder in the same ways: a study, a patient. It stands for all images below it.
"""

import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import takewhile

from trainyard.data.formats.folder import entries_of, is_folder
from trainyard.data.formats.scan import ARRAY_SUFFIX, IMAGE_SUFFIXES, is_hidden
from trainyard.data.formats.split_names import split_named

_named = cache(split_named)
_ENDINGS = frozenset(suffix[1:] for suffix in (*IMAGE_SUFFIXES, ARRAY_SUFFIX))
_SEPARATORS = re.compile(r"[\\/]+")


def parts_of(cell: str) -> list[str]:
    """The folders and the name in a path of any system, or in a URL."""
    if "/" not in cell and "\\" not in cell:
        return [cell] if cell not in ("", ".") else []
    return [part for part in _SEPARATORS.split(cell) if part not in ("", ".")]


def folder_in(cell: str) -> str:
    """The name of the folder that holds the image in a cell; "" without, and for a bucket."""
    parts = parts_of(cell)[2 if "://" in cell else 0 :]
    return parts[-2] if len(parts) > 1 else ""


class Images:
    """The images below a folder. They are looked for, in one walk, once a cell is no path."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.is_searched = False
        """True once a cell has stood for another path than its own."""

    def is_path(self, cell: str) -> bool:
        """True for the path of a file below the folder."""
        return os.path.isfile(os.path.join(self.root, cell))

    def named(self, cell: str) -> Sequence[str]:
        """The images, relative to the folder, that a cell can stand for: one, if it names one."""
        *above, name = parts_of(cell) or [""]
        stem = _stem(name)
        found = self._of_stem(stem or name)
        if stem:
            found = [path for path in found if path.rpartition("/")[2] == name]
        return _nearest(found, above)

    def folders_named(self, cell: str) -> Sequence[str]:
        """The folders with images, relative to the folder, that a cell can stand for."""
        *above, name = parts_of(cell) or [""]
        return _nearest(self._folders.get(name, ()), above)

    def below(self, folder: str) -> Sequence[str]:
        """All images below a folder, sorted."""
        start, end = (bisect_left(self._paths, f"{folder}{mark}") for mark in "/0")  # 0 is after /
        return self._paths[start:end]

    def example(self) -> str:
        """An image below the folder; "" without any."""
        found = next(iter(self._by_stem.values()), "")
        return found if isinstance(found, str) else found[0]

    def has_end(self, cell: str) -> bool:
        """True if the path of an image ends in all of a cell."""
        above = parts_of(cell)[:-1]
        return any(_depth(path.split("/")[:-1], above) == len(above) for path in self.named(cell))

    def alike(self, cell: str) -> Sequence[str]:
        """The images of a cell's name, with any suffix and in any folder."""
        name = (parts_of(cell) or [""])[-1]
        return self._of_stem(_stem(name) or name)

    def _of_stem(self, stem: str) -> Sequence[str]:
        found = self._by_stem.get(stem, ())
        return (found,) if isinstance(found, str) else found

    @cached_property
    def _paths(self) -> list[str]:
        each = self._by_stem.values()
        return sorted(path for one in each for path in ([one] if isinstance(one, str) else one))

    @cached_property
    def _folders(self) -> dict[str, list[str]]:
        """The folders with images somewhere below them, by name."""
        found = {""}
        for path in self._paths:
            while (path := path.rpartition("/")[0]) not in found:
                found.add(path)
        named = defaultdict[str, list[str]](list)
        for path in sorted(found - {""}):
            named[path.rpartition("/")[2]].append(path)
        return named

    @cached_property
    def _by_stem(self) -> dict[str, str | list[str]]:
        """The images by their names without a suffix; none below /, where cells are paths."""
        found: dict[str, str | list[str]] = {}
        for stem, path in _walk(self.root) if self.root != "/" else ():
            if (known := found.setdefault(stem, path)) is not path:
                found[stem] = [*([known] if isinstance(known, str) else known), path]
        return found


def _stem(name: str) -> str:
    """The name of an image without its suffix; "" for a name without one."""
    stem, _, ending = name.rpartition(".")
    return stem if ending in _ENDINGS or ending.lower() in _ENDINGS else ""


def _walk(root: str) -> Iterator[tuple[str, str]]:
    """The stems and paths of all images below a folder, without hidden ones.

    A link to a folder elsewhere is followed, once: the reader then tells where it leads.
    """
    seen, folders = {os.path.join(os.path.realpath(root), "")}, [""]
    while folders:
        folder = folders.pop()
        for entry in entries_of(os.path.join(root, folder)):
            name = entry.name
            if is_hidden(name):
                continue
            if not is_folder(entry):
                if stem := _stem(name):
                    yield stem, folder + name
                continue
            real = os.path.join(os.path.realpath(entry.path), "") if entry.is_symlink() else ""
            if not real or not any(real.startswith(one) or one.startswith(real) for one in seen):
                seen |= {real} - {""}
                folders.append(f"{folder}{name}/")


def _nearest(found: Sequence[str], above: Sequence[str]) -> Sequence[str]:
    """The paths that agree with most of the folders above a name in a cell."""
    if not above or not found:
        return found
    folders = [path.split("/")[:-1] for path in found]
    depths = [_depth(one, above) for one in folders]
    deepest = max(depths)
    return [
        path
        for path, one, depth in zip(found, folders, depths, strict=True)
        if depth == deepest and not _is_other_split(one, above, depth)
    ]


def _depth(folders: Sequence[str], above: Sequence[str]) -> int:
    """The number of folders, from the last one, in which two paths agree."""
    pairs = zip(reversed(folders), reversed(above), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_other_split(folders: Sequence[str], above: Sequence[str], depth: int) -> bool:
    """True if the parts in which two paths differ name different splits: the image is missing."""
    one = {*map(_named, folders[: len(folders) - depth])} - {""}
    other = {*map(_named, above[: len(above) - depth])} - {""}
    return bool(one and other and one.isdisjoint(other))
