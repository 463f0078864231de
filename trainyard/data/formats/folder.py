"""A folder per class, images inside at any depth: the layout of torchvision's ImageFolder.

Classes are the sorted names of the sub-folders and samples come in ImageFolder's order, so class
numbers and ids agree with every tool that reads this layout.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from trainyard.data.formats.scan import IMAGE_SUFFIXES, FileRows, Scan
from trainyard.data.location import Place

# Sizes are one stat per file: many at once hide the latency of a network file system.
_STAT_THREADS = 16


def recognises(place: Place) -> bool:
    return place.is_folder and bool(_class_names(place.root))


def scan(place: Place) -> Scan:
    classes = _class_names(place.root)
    folders = [_subfolders(place.root, name) for name in classes]
    return Scan(
        place=place,
        format="folder",
        classes=classes,
        watched=(".", *(path for paths in folders for path in paths)),
        rows=_rows(place.root, folders),
    )


def _class_names(location: str) -> list[str]:
    with os.scandir(location) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _subfolders(location: str, class_name: str) -> list[str]:
    """The class's folder and all below it, sorted, relative to the location."""
    top = os.path.join(location, class_name)
    walk = os.walk(top, followlinks=True)
    return sorted(os.path.relpath(path, location) for path, _, _ in walk)


def _rows(location: str, folders: list[list[str]]) -> Iterator[FileRows]:
    labelled = [(path, label) for label, paths in enumerate(folders) for path in paths]
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        listings = pool.map(lambda item: _images(location, item[0]), labelled)
        for (_, label), images in zip(labelled, listings, strict=True):
            for path, size in images:
                yield FileRows(path, [0], [size], [label])


def _images(location: str, folder: str) -> list[tuple[str, int]]:
    with os.scandir(os.path.join(location, folder)) as entries:
        return sorted(
            (os.path.join(folder, entry.name), entry.stat().st_size)
            for entry in entries
            if os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES and entry.is_file()
        )
