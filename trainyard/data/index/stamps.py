"""Stamps of data: an index is up to date while those of its data are equal to the saved ones.

A shard has a stamp of its own, and so has each folder that can gain files. Files of one image each
share one stamp, a digest of all their sizes and times, since an image that is saved again under its
name does not change its folder.

A local stamp is the time, the size, the time of change (ctime) and a digest. Copies and archives
bring old times back, so time and size do not tell that a file is the same one; the time of change,
which no program sets, does. Where it differs, as in a copy of the data, the digest decides: of a
list, of the names in a folder, and of spots of a large shard. Spots do not show that some labels
have changed. So a shard that has only these to go by is read anew if its time is whole seconds: a
tar or an image of a container set it. A time of nanoseconds comes with the content.
"""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from stat import S_ISDIR, S_ISREG

import numpy as np

from trainyard.data.arrays import Ints
from trainyard.data.formats.left_out import PLUGINS, kinds_of
from trainyard.data.formats.scan import IMAGE_FORMATS
from trainyard.data.index.table import Index, StringColumn
from trainyard.data.storage.ahead import look_at
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Stamp, is_remote, reason_of
from trainyard.errors import DataError

Stamps = dict[str, Stamp | None]

IMAGES = "./*"
"""The key of the images' stamp: no file or folder is called so."""
_PARTS = 64
_PART = 2048  # images of a part, at least
_REMOTE_THREADS = 256  # each look waits for a server
_SPOTS, _SPOT = 4, 16384  # of a shard: number, and bytes of each
_SMALL = 1 << 20  # bytes of a shard that is digested as a whole
_OF_SPOTS = "spots "  # begins the digest of spots


def stamps(root: str, names: tuple[str, ...], shards: frozenset[str] = frozenset()) -> Stamps:
    """The stamp of each file and folder under a folder or URL; None for a missing one.

    `shards`: the names of files too large to be digested as a whole.
    """
    base = os.path.join(root, "")
    if not is_remote(root):
        found = look_at(partial(_local_stamp, base, shards=shards), names)
        return dict(zip(names, found, strict=True))
    with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
        return dict(zip(names, pool.map(partial(_remote_stamp, base), names), strict=True))


def of_content(stamp: Stamp) -> Stamp:
    """A stamp without the time of change, which is another one in a copy of the file."""
    return [*stamp[:2], *stamp[3:]] if isinstance(stamp[0], int) else stamp


def is_stale(index: Index, *, patience_s: float = 5) -> bool:
    """True if the data of a saved index has changed, or is gone.

    A million files of one image each take 4 to 5 s on two cores, images in shards no time. Where
    they take longer than `patience_s`, as on a slow file server, only some are compared: the reader
    needs no size, so another one that has changed is read as it is.
    """
    left_out = index.left_out.kinds.keys()
    if any(not left_out.isdisjoint(kinds_of(kind)) for kind in PLUGINS if kind in IMAGE_FORMATS):
        return True  # the plug-in has been installed since
    saved = dict(index.stamps)
    images = saved.pop(IMAGES, None)
    if not images and any(name not in saved for name in index.file_names):
        return True  # it could never become stale
    if _has_changed(index.root, saved):
        return True
    give_up_at = time.monotonic() + patience_s
    for part, digest in enumerate(images or ()):
        if _digest(index.root, index.file_names, slice(part, None, len(images or ()))) != digest:
            return True
        if time.monotonic() > give_up_at:
            break
    return False


def images_stamp(root: str, names: StringColumn, sizes: Ints, times: Ints | None) -> Stamp:
    """A stamp of local files by their times, and by the sizes that the index has.

    It has a digest for each of several parts, which take every n-th file. `times`: None to look.
    """
    parts = max(1, min(_PARTS, len(names) // _PART))
    slices = (slice(part, None, parts) for part in range(parts))
    if times is not None:
        return [_digest_of_times(times[part], sizes[part]) for part in slices]
    return [_digest(root, names, part, sizes) for part in slices]


def _digest_of_times(times: Ints, sizes: Ints) -> str:
    return hashlib.sha256(np.stack([times, sizes], axis=1).tobytes()).hexdigest()


def _digest(root: str, names: StringColumn, part: slice, sizes: Ints | None = None) -> str:
    rows = np.arange(len(names))[part]
    ends, begins = names.ends[rows], np.where(rows, names.ends[rows - 1], 0)
    text, prefix = names.text.data, os.fsencode(os.path.join(root, ""))
    spans = [*zip(begins.tolist(), ends.tolist(), strict=True)]
    found = np.array(look_at(lambda span: _look(prefix + text[slice(*span)]), spans), np.int64)
    return _digest_of_times(found[:, 0], found[:, 1] if sizes is None else sizes[part])


def _look(path: bytes) -> tuple[int, int]:
    """The time and size of a file; -1 for a missing one."""
    try:
        stat = os.stat(path)
    except OSError:
        return -1, -1
    return stat.st_mtime_ns, stat.st_size


def _has_changed(root: str, saved: Stamps) -> bool:
    """True if a file or folder of a saved index has another stamp."""
    if is_remote(root):
        return stamps(root, tuple(saved)) != saved
    return not all(look_at(partial(_is_same, os.path.join(root, "")), [*saved.items()]))


def _is_same(prefix: str, named: tuple[str, Stamp | None]) -> bool:
    name, saved = named
    if saved is None or name == ".":
        return _local_stamp(prefix, name) == saved
    try:
        stat = os.stat(prefix + name)
    except OSError:
        return False
    if saved[:2] != [stat.st_mtime_ns, stat.st_size]:
        return False
    is_set = stat.st_mtime_ns % 10**9 == 0  # no clock gives whole seconds
    if len(saved) != 4:  # of an index of an earlier release
        return not is_set
    changed, digest = saved[2], str(saved[3])
    is_untouched = changed == stat.st_ctime_ns
    if is_untouched and not (is_set and stat.st_ctime_ns == stat.st_mtime_ns):
        return True  # else it may be a file system without a time of change
    of_spots = digest.startswith(_OF_SPOTS)
    if _digest_of(prefix + name, stat, in_spots=of_spots) != digest:
        return False
    return is_untouched or not (of_spots and is_set)


def _local_stamp(prefix: str, name: str, shards: frozenset[str] = frozenset()) -> Stamp | None:
    if name == ".":  # by its file names: its time changes when the index is saved in it
        return [_names_digest(prefix or ".")]
    path = prefix + name
    try:
        stat = os.stat(path)
    except OSError:
        return None
    digest = _digest_of(path, stat, in_spots=name in shards and stat.st_size > _SMALL)
    return [stat.st_mtime_ns, stat.st_size, stat.st_ctime_ns, digest]


def _digest_of(path: str, stat: os.stat_result, *, in_spots: bool) -> str:
    """A digest of a file, or of the names in a folder; "" if it cannot be read."""
    try:
        if S_ISDIR(stat.st_mode):
            return _names_digest(path)
        if not S_ISREG(stat.st_mode):
            return ""
        with open(path, "rb") as file:
            if not in_spots:
                return hashlib.file_digest(file, "sha256").hexdigest()
            starts = np.linspace(0, stat.st_size - _SPOT, _SPOTS, dtype=np.int64).tolist()
            spots = b"".join(os.pread(file.fileno(), _SPOT, start) for start in starts)
            return _OF_SPOTS + hashlib.sha256(spots).hexdigest()
    except OSError:
        return ""


def _names_digest(folder: str) -> str:
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    return hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()


def _remote_stamp(base: str, name: str) -> Stamp | None:
    try:
        with open_source(os.path.join(base, name)) as source:
            return source.stamp
    except OSError:
        return None


def check_present(resolved: ResolvedLocation) -> None:
    """DataError that names the first missing file of a remote place."""
    found = stamps(resolved.root, resolved.names)
    missing = [name for name, stamp in found.items() if stamp is None]
    if not missing:
        return
    if len(found) == 1:
        more = "; name shards, a file, or a folder that has a dataset.json"
    else:
        more = f" ({len(missing)} of {len(found)} are missing)"
    url = resolved.path(missing[0])
    try:
        open_source(url).close()
    except PermissionError as error:
        raise DataError("storage.failed", url=url, reason=reason_of(error, url)) from None
    except OSError:
        pass
    raise DataError("data.not-found", path=url, hint=more)
