"""A folder per class, with images at any depth: the layout of torchvision's ImageFolder.

Classes are the sorted names of the sub-folders and samples come in ImageFolder's order, so class
numbers and ids agree with every tool that reads this layout. All other files, hidden folders, links
to a folder above them and folders without an image are left out and counted. A folder without an
image stays a class if `dataset.json` or the other split has that class.

With `FOLDER#classes=path` the path of each folder that holds an image itself is a class, `a/abbey`;
with `#classes=name` its name, `abbey`, wherever it lies.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import NamedTuple

from trainyard.data.formats.format import Format, Shards
from trainyard.data.formats.left_out import (
    BROKEN_LINK,
    EMPTY,
    FEATURES,
    HIDDEN,
    LOOP,
    LOOSE,
    MASKS,
    NO_IMAGE,
    SPECIAL,
    LeftOut,
    ending,
    masks_in,
)
from trainyard.data.formats.remedies import remedy_beside
from trainyard.data.formats.scan import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    FileRows,
    FileScan,
    Scan,
    all_rows,
    in_threads,
    is_hidden,
    is_metadata,
)
from trainyard.data.formats.split_names import check_no_splits, split_named, splits_among
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.manifest import read_manifest
from trainyard.errors import DataError

# Parallel listings and sizes hide the latency of a network file system.
_STAT_THREADS = 16
_IMAGE_FOLDERS, _MASK_FOLDERS = {"images", "image", "imgs", "img"}, {"masks", "mask"}


class _Tree(NamedTuple):
    folders: list[str]
    """Sorted, relative to the location; without links to a folder above them."""
    images: dict[str, str]
    """The folders that hold an image themselves, with their paths without links."""
    broken: list[str]
    """Broken links, which change no folder when they are mended."""
    left_out: list[tuple[str, str]]
    """The kind and the path of each folder that is not entered."""


def recognises(place: ResolvedLocation) -> bool:
    """True if a location is a folder with folders in it; beside tars, if they hold an image."""
    if not place.is_folder:
        return False
    names = _folders_in(place.root)
    if not place.files(".tar"):
        return bool(names)
    return any(_tree(place.root, name).images for name in names)


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a folder. DataError if a folder in it cannot be read."""
    by = classes_by(place)
    names = _folders_in(place.root)
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        trees = list(pool.map(lambda name: _tree(place.root, name), names))
    folders = dict(zip(names, trees, strict=True))
    empty = [name for name, tree in folders.items() if tree.folders and not tree.images]
    elsewhere, telling = _elsewhere(place.root, [] if by else empty)
    left_out = files_left_out(place.root)
    for name, tree in folders.items():
        for kind, path in tree.left_out:
            left_out.add(kind, path)
        if name in empty and name not in elsewhere:
            left_out.add(NO_IMAGE, name)
            for path in tree.folders:
                left_out.update(_read_folder(place.root, path, -1).left_out)
    classes = [name for name in names if folders[name].images or name in elsewhere]
    # Folders that are left out may gain images, in the other split too.
    watched = [path for tree in trees for path in tree.folders]
    broken = [entry.name for entry in entries_of(place.root) if _is_broken(entry)]
    broken += [path for tree in trees for path in tree.broken]
    check_no_splits(place.location, classes, watched, remedy_beside(place.root, left_out))
    _check_once(place.location, folders, by)
    class_of = {path: name for name in classes for path in folders[name].folders}
    if by:
        class_of = {path: path if by == "path" else os.path.basename(path) for path in class_of}
        classes = sorted({class_of[path] for tree in trees for path in tree.images})
    number = {name: n for n, name in enumerate(classes)}
    found = in_threads(
        _STAT_THREADS,
        lambda path: _read_folder(place.root, path, number.get(class_of[path], -1)),
        [*class_of],
    )
    return Scan(
        place=place,
        format="folder",
        classes=classes,
        watched=(".", *watched, *telling, *broken),
        rows=all_rows(found, left_out),
        left_out=left_out,
    )


def classes_by(place: ResolvedLocation) -> str:
    """The value of `#classes=`: path, name, or "" without. DataError for another value."""
    value = place.options.get("classes", "")
    if "classes" in place.options and value not in ("path", "name"):
        raise DataError(
            "folder.unknown-classes",
            "{location}: #classes={value} is unknown: #classes=path takes the path of the folder "
            "that holds an image for its class, #classes=name its name, and without it the first "
            "folder is the class",
            location=place.location,
            value=value,
        )
    return value


def _check_once(location: str, folders: Mapping[str, _Tree], by: str) -> None:
    """DataError for a folder of images that is there by two names: each image would be two."""
    if not by:
        _check_no_copy(location, folders)
    names: dict[str, str] = {}
    for folder, real in (item for tree in folders.values() for item in tree.images.items()):
        if (other := names.setdefault(real, folder)) != folder:
            path = os.path.join(location, folder)
            raise DataError(
                "data.folder-twice",
                "{path}: is the same folder as {other}, by a link, so each of its images would "
                "count twice: remove one of the two",
                path=path,
                other=os.path.join(location, other),
            )


def _check_no_copy(location: str, folders: Mapping[str, _Tree]) -> None:
    """DataError for a class that holds folders named like classes: the data, inside of itself."""
    for name, tree in folders.items():
        inside = {os.path.basename(one) for one in tree.folders if os.path.dirname(one) == name}
        again = sorted(folders.keys() & inside)
        if again[1:]:
            raise DataError(
                "data.class-holds-classes",
                "{path}: holds {names}, which lie beside it too, as in a copy of the data inside "
                "of itself: name it as the location, or move it away",
                path=os.path.join(location, name),
                names=" and ".join(again[:3]),
            )


def files_left_out(location: str) -> LeftOut:
    """The files and hidden folders directly in a location, beside its class folders."""
    left_out = LeftOut()
    for entry in entries_of(location):
        if not is_metadata(entry.name) and (is_hidden(entry.name) or not is_folder(entry)):
            left_out.add(why_left_out(entry) or LOOSE, entry.name)
    return left_out


def _folders_in(location: str) -> list[str]:
    return [e.name for e in entries_of(location) if is_folder(e) and not is_hidden(e.name)]


def _tree(location: str, class_name: str) -> _Tree:
    """The class's folder and all folders below it."""
    folders, broken, images = list[str](), list[str](), dict[str, str]()
    left_out = list[tuple[str, str]]()
    # Each folder with the real paths of the folders above it.
    queue: list[tuple[str, tuple[str, ...]]] = [(class_name, (os.path.realpath(location),))]
    while queue:
        folder, above = queue.pop()
        path = os.path.join(location, folder)
        here = os.path.realpath(path)
        if here in above:
            left_out.append((LOOP, folder))
            continue
        folders.append(folder)
        inside = list[str]()
        for entry in _scandir(path):
            if is_hidden(entry.name):
                continue
            if _is_broken(entry):
                broken.append(os.path.join(folder, entry.name))
            elif entry.is_dir():
                inside.append(entry.name)
            elif folder not in images and why_left_out(entry) is None:
                images[folder] = here
        has_images = not _IMAGE_FOLDERS.isdisjoint(map(str.lower, inside))
        for name in inside:
            deeper = os.path.join(folder, name)
            if has_images and name.lower() in _MASK_FOLDERS:
                left_out.append((MASKS, deeper))
            else:
                queue.append((deeper, (*above, here)))
    return _Tree(sorted(folders), images, sorted(broken), sorted(left_out))


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
                tree = _tree(path, folder)
                watched += tree.folders
                found |= {name} if tree.images else set()
    return found, watched


def _read_folder(location: str, folder: str, label: int) -> FileScan:
    """The images of a folder itself, sorted, and those that are left out."""
    found, left_out = [], LeftOut()
    for entry in entries_of(os.path.join(location, folder)):
        if is_metadata(entry.name) or (is_folder(entry) and not is_hidden(entry.name)):
            continue
        path, kind = os.path.join(folder, entry.name), why_left_out(entry)
        if kind is None:
            found.append((path, entry.stat()))
        else:
            left_out.add(kind, path)
    masks = masks_in([path for path, _ in found])
    for path in masks:
        left_out.add(MASKS, path)
    found = [one for one in found if one[0] not in masks]
    others = [one for one in found if not _is_array(one[0])]
    # Arrays may hold features of the other images.
    for path, _ in found if others else []:
        if _is_array(path):
            left_out.add(FEATURES, path)
    rows = [
        FileRows(path, [0], [stat.st_size], [label], time=stat.st_mtime_ns)
        for path, stat in others or found
    ]
    return FileScan(rows, left_out)


def why_left_out(entry: os.DirEntry[str]) -> str | None:
    """The kind as which a file or a hidden folder is left out; None for an image or an array."""
    if is_hidden(entry.name):
        return HIDDEN
    if _is_broken(entry):
        return BROKEN_LINK
    if not entry.is_file():
        return SPECIAL
    if not has_image_suffix(entry.name):
        return ending(entry.name)
    return None if entry.stat().st_size else EMPTY


def has_image_suffix(name: str) -> bool:
    """True for the name of an image or an array."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES or _is_array(name)


def _is_array(name: str) -> bool:
    return name.lower().endswith(ARRAY_SUFFIX)


def _is_broken(entry: os.DirEntry[str]) -> bool:
    """True for a link that leads nowhere, to itself, or where this user may not go."""
    if not entry.is_symlink():
        return False
    try:
        entry.stat()
    except OSError:
        return True
    return False


def is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder, and for a link to one."""
    return not _is_broken(entry) and entry.is_dir()


def entries_of(path: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted by name. DataError if it cannot be read."""
    return sorted(_scandir(path), key=attrgetter("name"))


def _scandir(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError as error:
        raise DataError("file.unreadable", path=path, reason=error.strerror) from None


FORMAT = Format(
    name="folder",
    recognises=recognises,
    scan=scan,
    kind="image",
    options=("classes",),
    # Lists of the images' checksums, one for each chunk of samples.
    shards=Shards(
        write=None,
        name=lambda _, split, count: (f"checksums/{split}-", 5, ".sha256"),
        overhead=2304,  # half a block of a file system, and names
    ),
)
