"""Tars whose layout gives the class: each class is a folder in the tar, or a tar of its own.

- `imagenet21k_resized/imagenet21k_train/CLASS/x.JPEG`: the class is the parent folder. A folder
  above it with the word "train" or "val" in its name is a split; images in no split are left out.
- A tar of tars `CLASS.tar`, such as `fall11_whole.tar`: images are found inside by offset.
- Several tars `CLASS.tar`, in a folder or listed.

The reader does not guess: if the layout is ambiguous, an error says what is missing.
"""

import os
import re
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import groupby, islice
from operator import itemgetter
from typing import NamedTuple

from trainyard.data.formats.scan import FileRows, Scan, num_threads, tell_left_out
from trainyard.data.formats.split_names import splits_named, words_of
from trainyard.data.formats.tar import (
    BufferedTarReader,
    Member,
    is_hidden_image,
    is_image,
    members,
    some_names,
)
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.errors import DataError

_SPLITS = ("train", "val")
_CHUNK = 10_000  # samples; a tar may hold ten million
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")

# Names of layouts in errors.
_NUMBER = re.compile(r"\d+")
_FOLDERS, _INNER_TARS, _LOOSE = "in a folder of its class", "in a tar inside", "in no folder"


def recognises(place: ResolvedLocation) -> bool:
    """True if a location holds tars, compressed ones included."""
    return bool(place.files(".tar", *_COMPRESSED))


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a location, tar by tar; DataError if a class is ambiguous."""
    names = place.files(".tar")
    if not names:
        raise DataError(
            f"{place.path(place.files(*_COMPRESSED)[0])}: samples are read by their offset in a "
            "tar, which a compressed one does not have: decompress it to .tar"
        )
    check_all_read(place)
    labels = _Labels(is_alone=len(names) == 1, has_splits=bool(splits_inside(place)))
    return Scan(
        place=place,
        format="tar",
        classes=labels.classes,
        watched=place.watched(names),
        rows=_rows(place, names, labels),
        files=len(names),
    )


def check_all_read(place: ResolvedLocation) -> None:
    """DataError for a file named like a tar of a location, but compressed or in capitals."""
    names = place.files(".tar")
    alike = {_NUMBER.sub("#", name.removesuffix(".tar")) for name in names}
    for name in place.names:
        lower = name.lower()
        ending = next((ending for ending in (*_COMPRESSED, ".tar") if lower.endswith(ending)), None)
        is_shard = ending and _NUMBER.sub("#", name[: -len(ending)]) in alike
        if is_shard and name not in names:
            remedy = f"rename it to {name[:-4]}.tar" if ending == ".tar" else "decompress it"
            raise DataError(
                f"{place.path(name)}: a tar like {names[0]} that would not be read: {remedy}, or "
                "move it away"
            )


def splits_inside(place: ResolvedLocation) -> tuple[str, ...]:
    """The splits in the first tar, by a sample of its members."""
    names = place.files(".tar")
    if not names:
        return ()
    with closing(BufferedTarReader(open_source(place.path(names[0])))) as tar:
        first = next(members(tar), None)
        if first and _is_tar(first.name):
            seen: Iterator[str] = (m.name for m in members(tar) if _is_tar(m.name))
        else:
            seen = filter(is_image, some_names(tar))
        above = {tuple(name.split("/")[: -2 if is_image(name) else -1]) for name in seen}
    found = {_split_of(folders) for folders in above}
    return tuple(split for split in _SPLITS if split in found)


class _Home(NamedTuple):
    """The split and the label of the images of a folder or a tar."""

    split: str
    label: int


class _Labels:
    """Numbers classes in the order found, from several threads, and rejects ambiguous layouts."""

    def __init__(self, *, is_alone: bool, has_splits: bool) -> None:
        self.classes: list[str] = []
        self._is_alone = is_alone
        self._has_splits = has_splits
        self._numbers: dict[str, int] = {}
        self._folders: set[tuple[str, ...]] = set()
        self._layout: tuple[str, str] | None = None  # with the first member seen
        self._lock = threading.Lock()
        self.hidden: list[str] = []
        """Hidden images, which are left out."""

    def of_folder(self, path: str, name: str) -> _Home | None:
        """The split and label of images in the member `name`'s folder; None if in no split."""
        parts = tuple(part for part in name.split("/")[:-1] if part not in ("", "."))
        if not parts:
            self._expect(_LOOSE, path, name)
            _check_is_class(path, _stem(path), os.path.basename(name), alone=self._is_alone)
            return _Home("", self._number(_stem(path)))
        self._expect(_FOLDERS, path, name)
        split = self._split(path, name, parts[:-1])
        if split is None:
            return None
        with self._lock:
            self._folders.add(parts)
        return _Home(split, self._number(parts[-1]))

    def of_inner_tar(self, path: str, name: str) -> _Home | None:
        self._expect(_INNER_TARS, path, name)
        split = self._split(path, name, tuple(name.split("/")[:-1]))
        return None if split is None else _Home(split, self._number(_stem(name)))

    def check(self, location: str) -> None:
        """DataError if a class is inside another or the splits are classes; call it at the end."""
        for folder in self._folders:
            for end in range(1, len(folder)):
                if folder[:end] in self._folders:
                    raise DataError(
                        f"{location}: there are images in {'/'.join(folder[:end])} and in "
                        f"{'/'.join(folder)}: which of them is the class?"
                    )
        if self.classes and all(map(_is_split, self.classes)):
            raise DataError(
                f"{location}: holds images but no labels: they lie directly in "
                f"{' and '.join(sorted(self.classes))}, without a folder or a tar per class"
            )

    def _number(self, class_name: str) -> int:
        with self._lock:
            number = self._numbers.setdefault(class_name, len(self.classes))
            if number == len(self.classes):
                self.classes.append(class_name)
            return number

    def _expect(self, layout: str, path: str, name: str) -> None:
        with self._lock:
            self._layout = self._layout or (layout, name)
            known, first = self._layout
        if known != layout:
            raise DataError(
                f"{path}: {name!r} lies {layout}, but {first!r} {known}: which one is the class?"
            )

    def _split(self, path: str, name: str, folders: tuple[str, ...]) -> str | None:
        split = _split_of(folders)
        if split and not self._has_splits:
            raise DataError(
                f"{path}: {name!r} lies in a folder of {split} data, but most of the tar lies in "
                "none; name the folders train and val, or give each split a tar of its own"
            )
        return None if self._has_splits and not split else split


def _check_is_class(path: str, stem: str, name: str, *, alone: bool = False) -> None:
    """DataError unless a tar of loose images, such as `name`, is surely a class."""
    is_imagenets_way = name.startswith(stem) and not name[len(stem) : len(stem) + 1].isalnum()
    if stem.strip(".") and (is_imagenets_way or not (alone or stem[-1].isdigit())):
        return
    raise DataError(
        f"{path}: holds images but no labels: no .cls or .json beside {name!r}, no folder per "
        f"class around it, and {stem!r} does not look like a class (its images would be named "
        f"'{stem}_…'); ImageNet's own archives go through `trainyard data prepare`"
    )


def _split_of(folders: tuple[str, ...]) -> str:
    """The split that the innermost folder with such a name stands for; "" if there is none."""
    for folder in reversed(folders):
        found = splits_named(folder)
        if len(found) == 1:  # not "train-and-val"
            return found.pop()
    return ""


def _is_split(class_name: str) -> bool:
    """True if a folder is named like a split, so that it is no class."""
    return bool(splits_named(class_name) or words_of(class_name) & {"test", "testing"})


def _stem(name: str) -> str:
    return os.path.basename(name).removesuffix(".tar")


def _is_tar(name: str) -> bool:
    return name.endswith(".tar") and name[name.rfind("/") + 1] != "."


def _rows(place: ResolvedLocation, names: tuple[str, ...], labels: _Labels) -> Iterator[FileRows]:
    if len(names) == 1:
        yield from _tar_rows(place, names[0], labels)
    else:
        with ThreadPoolExecutor(num_threads(place)) as pool:
            for rows in pool.map(lambda name: list(_tar_rows(place, name, labels)), names):
                yield from rows
    labels.check(place.location)
    tell_left_out(place.location, {"hidden": labels.hidden})


def _tar_rows(place: ResolvedLocation, name: str, labels: _Labels) -> Iterator[FileRows]:
    with closing(BufferedTarReader(open_source(place.path(name)))) as tar:
        for split, images in groupby(_images(tar, labels), key=itemgetter(3)):
            while chunk := list(islice(images, _CHUNK)):
                offsets, sizes, numbers, _ = zip(*chunk, strict=True)
                yield FileRows(
                    name, array("q", offsets), array("q", sizes), array("i", numbers), split
                )


def _images(tar: BufferedTarReader, labels: _Labels) -> Iterator[tuple[int, int, int, str]]:
    """Offset, size, label and split of each image."""
    folder: str | None = None
    home: _Home | None = None
    for member in members(tar):
        if _is_tar(member.name):
            home = labels.of_inner_tar(tar.name, member.name)
            if home is not None:
                for image in _flat_images(tar, member):
                    yield image.offset, image.size, home.label, home.split
        elif is_image(member.name):
            parent = member.name.rpartition("/")[0]
            if parent != folder:
                folder, home = parent, labels.of_folder(tar.name, member.name)
            if home is not None:
                yield member.offset, member.size, home.label, home.split
        elif is_hidden_image(member.name):
            labels.hidden.append(member.name)


def _flat_images(tar: BufferedTarReader, inner: Member) -> Iterator[Member]:
    """The images of a tar inside a tar. DataError if a folder inside has another name than it."""
    stem, is_class = _stem(inner.name), False
    for member in members(tar, inner.offset, inner.offset + inner.size):
        folder, _, base = member.name.rpartition("/")
        if base.endswith((".tar", ".cls")):
            raise DataError(
                f"{tar.name}: the tar {inner.name!r} inside holds {base!r}, but images of one "
                "class were expected; unpack the outer tar and name the inner ones"
            )
        if is_image(base):
            if folder not in ("", ".", stem, f"./{stem}"):
                raise DataError(
                    f"{tar.name}: the image {member.name!r} of the tar {inner.name!r} inside: "
                    f"is its class {stem!r} or its folder?"
                )
            if not is_class:
                _check_is_class(tar.name, stem, base)
                is_class = True
            yield member
