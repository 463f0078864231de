"""A LOCATION as users write it: a folder, a file, a glob or a brace list, here or on a server.

`FILE#train` and `FILE#val` name the splits of a file that holds several.
"""

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainyard.data.source import is_remote
from trainyard.errors import DataError

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SPLIT = re.compile(r"(.+)#(\w+)")


@dataclass(frozen=True)
class Place:
    """What a location names."""

    location: str
    """As written, without the split."""
    split: str | None
    root: str
    """The folder, or URL of one, that holds everything; names are relative to it."""
    names: tuple[str, ...]
    """The files in order; of a folder those directly in it, sorted, hidden ones aside."""
    is_folder: bool
    can_gain: bool
    """A folder or a glob: a file that appears there belongs to it."""

    def files(self, *suffixes: str) -> tuple[str, ...]:
        """The names with one of the suffixes."""
        return tuple(name for name in self.names if name.endswith(suffixes))

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def watched(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """What must not change lest an index of these files be out of date."""
        folders = {str(above) for name in names for above in Path(name).parents}
        return (*sorted(folders if self.can_gain else ()), *names)


def find_place(location: str) -> Place:
    """The files that a location names, each local one checked to exist."""
    location, split = split_of(location)
    if not is_remote(location) and os.path.isdir(location):
        names = tuple(_files_in(location))
        return Place(location, split, location, names, is_folder=True, can_gain=True)
    paths = _list_files(location)
    root = _common_folder(paths)
    prefix = os.path.join(root, "")
    names = tuple(
        path[len(prefix) :] if path.startswith(prefix) else os.path.relpath(path, root)
        for path in paths
    )
    can_gain = not is_remote(location) and glob.has_magic(location)
    return Place(location, split, root, names, is_folder=False, can_gain=can_gain)


def split_of(location: str) -> tuple[str, str | None]:
    """`FILE#train` as FILE and "train"; a name that has a # of its own stays whole."""
    match = _SPLIT.fullmatch(location)
    if match is None or os.path.exists(location):
        return location, None
    return match[1], match[2]


def expand_braces(text: str) -> list[str]:
    """`a{08..10}` as `a08`, `a09`, `a10`; the width of the first number is kept."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    first, last = match.groups()
    names = [
        f"{text[: match.start()]}{number:0{len(first)}d}{text[match.end() :]}"
        for number in range(int(first), int(last) + 1)
    ]
    return [full for name in names for full in expand_braces(name)]


def _list_files(location: str) -> list[str]:
    """The files that a glob, a brace list or a single path or URL names."""
    if is_remote(location):
        names = expand_braces(location)
    elif os.path.exists(location):  # whatever characters its name has
        names = [location]
    else:
        names = _matches(location) or [
            p for n in expand_braces(location) for p in _matches(n) or [n]
        ]
    if not location:
        raise DataError("an empty location: name a folder, a file, shards or a URL")
    if not names:
        raise DataError(f"{location}: no file matches")
    missing = [name for name in names if not is_remote(name) and not os.path.isfile(name)]
    if missing:
        more = f" ({len(missing)} of {len(names)} are missing)" if len(names) > 1 else ""
        raise DataError(f"{missing[0]}: no such file or folder{more}")
    return names


def _matches(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern)) if glob.has_magic(pattern) else []


def _common_folder(paths: list[str]) -> str:
    scheme, mark, _ = paths[0].rpartition("://")
    scheme += mark
    folders = [os.path.dirname(path.removeprefix(scheme)) or "." for path in paths]
    return scheme + (os.path.commonpath(folders) or ".")


def _files_in(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_file() and not e.name.startswith("."))
