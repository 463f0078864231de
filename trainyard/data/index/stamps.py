"""Stamps of data: an index is up to date while those of its data are equal to the saved ones.

A shard has a stamp of its own, and so has each folder that can gain files. Files of one image each
share one stamp, a digest of all their sizes and times, since an image that is saved again under its
name does not change its folder.
"""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from trainyard.data.formats.left_out import HEIF_KINDS
from trainyard.data.formats.scan import IMAGE_FORMATS
from trainyard.data.index.table import Index, StringColumn
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Stamp, is_remote, reason_of
from trainyard.errors import DataError

Stamps = dict[str, Stamp | None]

IMAGES = "./*"
"""The key of the images' stamp: no file or folder is called so."""
_PARTS = 64
_CHUNK = 2048  # images that a thread looks at in a row
_THREADS, _REMOTE_THREADS = 16, 32  # each look may wait for a file server


def stamps(root: str, names: tuple[str, ...]) -> Stamps:
    """The stamp of each file and folder under a folder or URL; None for a missing one."""
    if not is_remote(root):
        prefix = os.path.join(root, "")
        return {name: _local_stamp(prefix, name) for name in names}
    urls = [os.path.join(root, name) for name in names]
    with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
        return dict(zip(names, pool.map(_remote_stamp, urls), strict=True))


def is_stale(index: Index, *, patience_s: float = 5) -> bool:
    """True if the data of a saved index has changed, or is gone.

    A million files of one image each take 4 to 5 s on two cores, images in shards no time. Where
    they take longer than `patience_s`, as on a slow file server, only some are compared: the reader
    needs no size, so another one that has changed is read as it is.
    """
    if "HEIF" in IMAGE_FORMATS and not index.left_out.kinds.keys().isdisjoint(HEIF_KINDS):
        return True  # the plug-in has been installed since
    saved = dict(index.stamps)
    images = saved.pop(IMAGES, None)
    if not images and any(name not in saved for name in index.file_names):
        return True  # it could never become stale
    if stamps(index.root, tuple(saved)) != saved:
        return True
    give_up_at = time.monotonic() + patience_s
    for part, digest in enumerate(images or ()):
        if _digest(index.root, index.file_names, slice(part, None, len(images or ()))) != digest:
            return True
        if time.monotonic() > give_up_at:
            break
    return False


def images_stamp(root: str, names: StringColumn, sizes: NDArray[np.int64]) -> Stamp:
    """A stamp of local files by their times, and by the sizes that the index has.

    It has a digest for each of several parts, which take every n-th file.
    """
    parts = max(1, min(_PARTS, len(names) // _CHUNK))
    return [_digest(root, names, slice(part, None, parts), sizes) for part in range(parts)]


def _digest(
    root: str, names: StringColumn, part: slice, sizes: NDArray[np.int64] | None = None
) -> str:
    rows = np.arange(len(names))[part]
    ends, begins = names.ends[rows], np.where(rows, names.ends[rows - 1], 0)
    text, prefix = names.text.data, os.fsencode(os.path.join(root, ""))

    def looks(first: int) -> list[tuple[int, int]]:
        some = slice(first, first + _CHUNK)
        spans = zip(begins[some].tolist(), ends[some].tolist(), strict=True)
        return [_look(prefix + text[begin:end]) for begin, end in spans]

    with ThreadPoolExecutor(_THREADS) as pool:
        chunks = [*pool.map(looks, range(0, len(ends), _CHUNK))]
    found = np.array([look for chunk in chunks for look in chunk], np.int64)
    if sizes is not None:
        found[:, 1] = sizes[part]
    return hashlib.sha256(found.tobytes()).hexdigest()


def _look(path: bytes) -> tuple[int, int]:
    """The time and size of a file; -1 for a missing one."""
    try:
        stat = os.stat(path)
    except OSError:
        return -1, -1
    return stat.st_mtime_ns, stat.st_size


def _local_stamp(prefix: str, name: str) -> Stamp | None:
    if name == ".":  # by its file names: its time changes when the index is saved in it
        names = sorted(e for e in os.listdir(prefix or ".") if not e.startswith("."))
        return [hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()]
    try:
        stat = os.stat(prefix + name)
    except OSError:
        return None
    return [stat.st_mtime_ns, stat.st_size]


def _remote_stamp(url: str) -> Stamp | None:
    try:
        with closing(open_source(url)) as source:
            return source.stamp
    except OSError:
        return None


def check_present(place: ResolvedLocation) -> None:
    """DataError that names the first missing file of a remote place."""
    found = stamps(place.root, place.names)
    missing = [name for name, stamp in found.items() if stamp is None]
    if not missing:
        return
    if len(found) == 1:
        more = "; name shards, a file, or a folder that has a dataset.json"
    else:
        more = f" ({len(missing)} of {len(found)} are missing)"
    url = place.path(missing[0])
    try:
        open_source(url).close()
    except PermissionError as error:
        raise DataError("storage.failed", url=url, reason=reason_of(error, url)) from None
    except OSError:
        pass
    raise DataError("data.not-found", path=url, hint=more)
