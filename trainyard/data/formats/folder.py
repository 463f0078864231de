"""A folder per class, with images at any depth: the layout of torchvision's ImageFolder.

Classes are the sorted names of the sub-folders and samples come in ImageFolder's order, so class
numbers and ids agree with every tool that reads this layout. Hidden files and folders, `__MACOSX`,
links to a folder above them, broken links, and folders without an image are left out and counted. A
folder without an image stays a class if `dataset.json` or the other split has that class.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from trainyard.data.formats.left_out import (
    BROKEN_LINK,
    FEATURES,
    HIDDEN,
    LOOP,
    NO_IMAGE,
    LeftOut,
)
from trainyard.data.formats.scan import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    FileRows,
    FileScan,
    Scan,
    Via,
    all_rows,
    directly,
    in_threads,
    is_hidden,
)
from trainyard.data.formats.split_names import check_no_splits, split_named, splits_among
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.manifest import read_manifest
from trainyard.errors import DataError

# Parallel listings and sizes hide the latency of a network file system.
_STAT_THREADS = 16


class _Tree(NamedTuple):
    folders: list[str]
    """Sorted, relative to the location; without links to a folder above them."""
    has_image: bool


def recognises(place: ResolvedLocation) -> bool:
    """True if a location is a folder with folders in it."""
    return place.is_folder and bool(_folders_in(place.root))


def scan(place: ResolvedLocation, via: Via = directly) -> Scan:
    """The samples of a folder. DataError if a folder in it cannot be read."""
    left_out, broken = LeftOut(), list[str]()  # a mended link changes no folder
    names = _folders_in(place.root, left_out)
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        trees = list(pool.map(lambda name: _tree(place.root, name, left_out, broken), names))
    folders = dict(zip(names, trees, strict=True))
    empty = [name for name, tree in folders.items() if tree.folders and not tree.has_image]
    elsewhere, telling = _elsewhere(place.root, empty)
    for name in empty:
        if name not in elsewhere:
            left_out.add(NO_IMAGE, name)
    classes = [name for name in names if folders[name].has_image or name in elsewhere]
    # Folders that are left out may gain images, in the other split too.
    watched = [path for tree in trees for path in tree.folders]
    check_no_splits(place.location, classes, watched)
    label_of = {path: n for n, name in enumerate(classes) for path in folders[name].folders}
    read = in_threads(_STAT_THREADS, lambda path: _read_folder(place.root, path, label_of[path]))
    return Scan(
        place=place,
        format="folder",
        classes=classes,
        watched=(".", *watched, *telling, *sorted(broken)),
        rows=all_rows(via(read, [*label_of]), left_out),
        left_out=left_out,
    )


def _folders_in(location: str, left_out: LeftOut | None = None) -> list[str]:
    with os.scandir(location) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    if left_out is not None:
        for name in filter(is_hidden, names):
            left_out.add(HIDDEN, name)
    return [name for name in names if not is_hidden(name)]


def _tree(location: str, class_name: str, left_out: LeftOut, broken: list[str]) -> _Tree:
    """The class's folder and all folders below it; adds the paths of `broken` links."""
    found, has_image = [], False
    # Each folder with the real paths of the folders above it.
    queue: list[tuple[str, tuple[str, ...]]] = [(class_name, (os.path.realpath(location),))]
    while queue:
        folder, above = queue.pop()
        path = os.path.join(location, folder)
        here = os.path.realpath(path)
        if here in above:
            left_out.add(LOOP, folder)
            continue
        found.append(folder)
        for entry in _entries(path):
            if _is_broken(entry):
                broken.append(os.path.join(folder, entry.name))
                left_out.add(BROKEN_LINK, broken[-1])
                continue
            has_image = has_image or _is_image(entry)
            if entry.is_dir() and is_hidden(entry.name):
                left_out.add(HIDDEN, os.path.join(folder, entry.name))
            elif entry.is_dir():
                queue.append((os.path.join(folder, entry.name), (*above, here)))
    return _Tree(sorted(found), has_image)


def _elsewhere(location: str, names: Sequence[str]) -> tuple[set[str], list[str]]:
    """The `names` that are classes in dataset.json or another split, and the folders examined.

    Folders are relative to the location.
    """
    path = os.path.abspath(location)
    above, own = os.path.split(path)
    if not names or not split_named(own):
        return set(), []
    manifest = read_manifest(above)
    listed = {*(manifest.classes or ())} if manifest and manifest.format == "folder" else set()
    found, watched = listed.intersection(names), []
    for other in _folders_in(above):
        for name in names if splits_among([own, other]) else ():
            folder = os.path.join("..", other, name)
            watched.append(folder)
            if os.path.isdir(os.path.join(path, folder)):
                tree = _tree(path, folder, LeftOut(), [])
                watched += tree.folders
                found |= {name} if tree.has_image else set()
    return found, watched


def _read_folder(location: str, folder: str, label: int) -> FileScan:
    """The images of a folder itself, sorted, and those that are left out."""
    found, left_out = [], LeftOut()
    for entry in _entries(os.path.join(location, folder)):
        path = os.path.join(folder, entry.name)
        if _is_broken(entry):
            continue
        if _is_image(entry):
            found.append((path, entry.stat().st_size))
        elif is_hidden(entry.name) and _has_suffix(entry.name) and entry.is_file():
            left_out.add(HIDDEN, path)
    others = [one for one in found if not _is_array(one[0])]
    # Arrays may hold features of the other images.
    for path, _ in found if others else []:
        if _is_array(path):
            left_out.add(FEATURES, path)
    rows = [FileRows(path, [0], [size], [label]) for path, size in sorted(others or found)]
    return FileScan(rows, left_out=left_out)


def _is_image(entry: os.DirEntry[str]) -> bool:
    return _has_suffix(entry.name) and not is_hidden(entry.name) and entry.is_file()


def _is_broken(entry: os.DirEntry[str]) -> bool:
    """True for a link, named like an image, to no file that can be found."""
    if not entry.is_symlink() or is_hidden(entry.name) or not _has_suffix(entry.name):
        return False
    try:
        entry.stat()
    except OSError:
        return True
    return False


def _has_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES or _is_array(name)


def _is_array(name: str) -> bool:
    return name.lower().endswith(ARRAY_SUFFIX)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
