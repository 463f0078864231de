"""The index of remote data: the current stamps of its files, and a saved index beside them."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from trainyard.data.index.table import Columns, Index, load_index, save_index
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.data.storage.remote import retry
from trainyard.data.storage.remote.download import download
from trainyard.data.storage.source import Stamp
from trainyard.errors import DataError

_LOOKS_AT_ONCE = 32

Stamps = dict[str, Stamp | None]


def remote_stamps(root: str, names: tuple[str, ...]) -> Stamps:
    """The server's stamp of each file under a URL; None for a missing file."""
    paths = [os.path.join(root, name) for name in names]
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        return dict(zip(names, pool.map(_stamp, paths), strict=True))


def _stamp(url: str) -> Stamp | None:
    try:
        with closing(open_source(url)) as source:
            return source.stamp
    except OSError:
        return None


def check_present(place: ResolvedLocation) -> None:
    """DataError that names the first missing file of a remote place."""
    stamps = remote_stamps(place.root, place.names)
    missing = [name for name, stamp in stamps.items() if stamp is None]
    if not missing:
        return
    if len(stamps) == 1:
        more = "; name shards, a file, or a folder that has a dataset.json"
    else:
        more = f" ({len(missing)} of {len(stamps)} are missing)"
    url = place.path(missing[0])
    try:
        open_source(url).close()
    except PermissionError as error:
        raise DataError(f"{url}: {str(error).removeprefix(f'{url}: ')}") from None
    except OSError:
        pass
    raise DataError(f"{url}: there is no such file{more}")


def fetch_index(place: ResolvedLocation, name: str, path: Path) -> Index | None:
    """The index `name` beside remote data, saved in `path`; None if there is none that fits."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".index-", dir=path.parent) as folder:
            index = _downloaded(place.path(name), Path(folder) / "index")
            if index is None:
                return None
            stamps = remote_stamps(place.root, place.names)
            if not _fits(index, stamps):
                return None
            header = {
                "root": place.root,
                "format": index.format,
                "classes": list(index.classes),
                "has_names": index.has_names,
                "stamps": {name: stamps[name] for name in index.stamps},
            }
            save_index(path, header, _columns(index))
    except OSError:  # no such file, or no disk space
        return None
    return load_index(path)


def _downloaded(url: str, path: Path) -> Index | None:
    """None for another kind of file, or one that the server does not give; OSError without one."""
    try:
        with retry.at_most(retry.OPTIONAL_S):
            download(url, path)
    except retry.Refused:
        return None
    except retry.GaveUp as error:
        retry.tell_passed_over(error)
        return None
    return _loaded(path)


def _loaded(path: Path) -> Index | None:
    try:
        return load_index(path)
    except (LookupError, TypeError, AttributeError):  # another kind of file
        return None


def _columns(index: Index) -> Columns:
    return {
        "file": index.file,
        "offset": index.offset,
        "size": index.size,
        "label": index.label,
        "file_name_text": index.file_names.text,
        "file_name_ends": index.file_names.ends,
        **index.optional_columns(),
        **index.list_columns(),
    }


def _fits(index: Index, stamps: Stamps) -> bool:
    """True if a downloaded index describes these very files and nothing outside them."""
    looks = {name: stamp for name, stamp in stamps.items() if stamp is not None}
    names = [index.file_names[row] for row in range(len(index.file_names))]
    if not names or not {*names, *index.stamps} <= looks.keys():
        return False
    sizes = [stamp and stamp[-1] for stamp in index.stamps.values()]
    if sizes != [looks[name][-1] for name in index.stamps]:
        return False
    file, ends = index.file, index.offset + index.size
    in_files = file.min() >= 0 and file.max() < len(names)
    if not in_files or index.offset.min() < 0 or index.size.min() < 0:
        return False
    file_sizes = np.array([looks[name][-1] for name in names], np.int64)
    if index.lists is not None:
        in_classes = index.lists.is_sound(index.label, len(index.classes))
    else:
        in_classes = index.label.min() >= 0 and index.label.max() < len(index.classes)
    return bool(in_classes and np.all(ends <= file_sizes[file]))
