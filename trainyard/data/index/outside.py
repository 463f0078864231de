"""Files of an index that lie outside of the folder of its data: by their names, or by links."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from trainyard.data.index.table import Index
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.manifest import is_inside
from trainyard.data.storage.source import is_remote

_SIGNS = (b"..", b"://", b"\0")  # a relative name without these stays inside
_CHUNK, _THREADS = 2048, 16  # files that a thread looks at in a row: a file server may be slow


def names_stay_inside(index: Index, resolved: ResolvedLocation) -> bool:
    """True if no name in an index leads out of the folder of its data, or of the option `root`."""
    names = index.file_names
    begins = names.ends - np.diff(names.ends, prepend=0)
    content = names.text.tobytes()
    is_absolute = names.text[begins[begins < names.ends]] == ord("/")
    if not is_absolute.any() and not any(sign in content for sign in _SIGNS):
        return True  # without a look at each name
    folder = os.path.realpath(resolved.root)
    root = os.path.abspath(os.path.join(resolved.root, resolved.options.get("root", "")))
    return all(
        is_inside(name)
        or (_is_under(root, os.path.normpath(os.path.join(folder, name))) and not is_remote(name))
        for name in names
    )


def linked_outside(index: Index) -> list[tuple[str, str]]:
    """The local files of an index that links lead out of the folder of its data.

    The name and the real path of each.
    """
    names = [] if is_remote(index.root) else [*index.file_names]
    look = look_outside(index)

    def look_at(first: int) -> list[tuple[str, str]]:
        paths = ((name, look(name)) for name in names[first : first + _CHUNK])
        return [(name, real) for name, real in paths if real is not None]

    with ThreadPoolExecutor(_THREADS) as pool:
        chunks = [*pool.map(look_at, range(0, len(names), _CHUNK))]
    return [one for chunk in chunks for one in chunk]


def look_outside(index: Index) -> Callable[[str], str | None]:
    """The function for the real path of a local file of an index, by its name.

    It gives None for one that no link leads out of the folder of the data; of merged data, which
    has several, out of the one that all names share.
    """
    names = index.file_names
    root = index.root or os.path.commonpath([os.path.dirname(min(names)), max(names)])
    real_folder = cache(os.path.realpath)

    def look(name: str) -> str | None:
        folder, last = os.path.split(os.path.join(root, name))
        path = os.path.join(real_folder(folder), last)
        real = os.path.realpath(path) if os.path.islink(path) else path
        is_as_named = real == os.path.normpath(os.path.join(real_folder(root), name))
        return None if is_as_named or _is_under(real_folder(root), real) else real

    return look


def _is_under(folder: str, path: str) -> bool:
    return path.startswith(os.path.join(folder, ""))
