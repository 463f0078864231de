"""Tars whose layout gives the class: each class is a folder in the tar, or a tar of its own.

- `imagenet21k_resized/imagenet21k_train/CLASS/x.JPEG`: the class is the parent folder. A folder
  above it whose name holds the word train, val or test is a split; images in no split are left
  out.
- A tar of tars `CLASS.tar`, such as `fall11_whole.tar`: images are found inside by offset.
- Several tars `CLASS.tar`, in a folder or listed.

The reader does not guess: if the layout is ambiguous, an error says what is missing. So is a name
that is stored twice (`tar -r`): unpacked, the last one is all there is.
"""

import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import NamedTuple

from trainyard.data.formats.format import Format
from trainyard.data.formats.left_out import EMPTY, NO_SPLIT, LeftOut, is_like_mask, masks_in
from trainyard.data.formats.remedies import COMPRESSED, remedy
from trainyard.data.formats.scan import (
    FileRows,
    Scan,
    in_threads,
    num_threads,
    scan_of_files,
    several,
)
from trainyard.data.formats.split_names import SPLITS, check_no_splits, split_named
from trainyard.data.formats.tar import (
    BufferedTarReader,
    Member,
    is_image,
    members,
    some_names,
    why_left_out,
)
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.errors import DataError

_CHUNK = 10_000  # samples; a tar may hold ten million

# Names of layouts in errors.
_NUMBER = re.compile(r"\d+")
_FOLDERS, _INNER_TARS, _LOOSE = "in a folder of its class", "in a tar inside", "in no folder"


def recognises(place: ResolvedLocation) -> bool:
    """True if a location holds tars, compressed ones included."""
    return bool(place.files(".tar", *COMPRESSED))


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a location, tar by tar; DataError if a class is ambiguous."""
    names = place.files(".tar")
    if not names:
        path = place.path(place.files(*COMPRESSED)[0])
        raise DataError("tar.compressed", path=path, hint=f" to .tar{remedy([path])}")
    check_all_read(place)
    has_splits = bool(splits_inside(place))
    labels = _Labels(is_alone=len(names) == 1, has_splits=has_splits)
    read = partial(_read, place, has_splits)
    if len(names) == 1:  # of any size
        tars = iter([read(names[0])])
    else:
        tars = in_threads(num_threads(place), lambda name: read(name).whole(), names)
    left_out = LeftOut()
    rows = _rows(place, tars, labels, left_out)
    return scan_of_files(
        place, names, rows, format="tar", classes=labels.classes, left_out=left_out
    )


def check_all_read(place: ResolvedLocation) -> None:
    """DataError for a file named like a tar of a location, but compressed or in capitals."""
    names = place.files(".tar")
    alike = {_NUMBER.sub("#", name.removesuffix(".tar")) for name in names}
    for name in place.names:
        lower = name.lower()
        ending = next((ending for ending in (*COMPRESSED, ".tar") if lower.endswith(ending)), None)
        is_shard = ending and _NUMBER.sub("#", name[: -len(ending)]) in alike
        if is_shard and name not in names:
            remedy = f"rename it to {name[:-4]}.tar" if ending == ".tar" else "decompress it"
            raise DataError(
                "tar.passed-over",
                "{path}: a tar like {like} that would not be read: {hint}, or move it away",
                path=place.path(name),
                like=names[0],
                hint=remedy,
            )


def splits_inside(place: ResolvedLocation) -> tuple[str, ...]:
    """The splits in the first tar, by a sample of its members."""
    names = place.files(".tar")
    if not names:
        return ()
    with BufferedTarReader(open_source(place.path(names[0]))) as tar:
        first = next(members(tar), None)
        if first and _is_tar(first.name):
            seen: Iterator[str] = (m.name for m in members(tar) if _is_tar(m.name))
        else:
            seen = (name for name in some_names(tar) if is_image(name) and _folders_of(name))
        above = {tuple(name.split("/")[: -2 if is_image(name) else -1]) for name in seen}
    found = {_split_of(folders): "/".join(folders) for folders in sorted(above)}
    outside = found.pop("", None)
    if len(found) == 1 and outside is not None:  # the images in no split would be left out
        ((split, folder),) = found.items()
        raise DataError(
            "tar.split-or-class",
            "{location}: is {folder} a folder of {split} data, or of classes like the others? "
            "Give each split a folder, or unpack the tar and name the data by --data.train",
            location=place.location,
            folder=folder,
            split=split,
        )
    return tuple(split for split in SPLITS if split in found)


class _Labels:
    """Numbers classes in the order found, and rejects ambiguous layouts."""

    def __init__(self, *, is_alone: bool, has_splits: bool) -> None:
        self.classes: list[str] = []
        self._is_alone = is_alone
        self._has_splits = has_splits
        self._numbers: dict[str, int] = {}
        self._folders: set[tuple[str, ...]] = set()
        # The folder or tar of each split and class, without and with one around all others.
        self._homes: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._layout: tuple[str, str] | None = None  # with the first member seen

    def of_home(self, path: str, layout: str, name: str) -> int:
        """The label of images in a folder, or in an inner tar; -1 if in no split.

        `name`: the inner tar, or the folder's first image.
        """
        folders = _folders_of(name)
        if layout == _FOLDERS and not folders:
            self._expect(_LOOSE, path, name)
            _check_is_class(path, _stem(path), os.path.basename(name), alone=self._is_alone)
            return self._number(path, "", _stem(path), (path,))
        self._expect(layout, path, name)
        split = _split_above(layout, name)
        if split and not self._has_splits:
            raise DataError(
                "tar.partly-in-split",
                "{path}: {name!r} lies in a folder of {split} data, but most of the tar lies in "
                "none; name the folders train and val, or give each split a tar of its own",
                path=path,
                name=name,
                split=split,
            )
        if self._has_splits and not split:
            return -1
        if layout == _INNER_TARS:
            return self._number(path, split, _stem(name), (*folders, os.path.basename(name)))
        self._folders.add(folders)
        return self._number(path, split, folders[-1], folders)

    def check(self, location: str) -> None:
        """DataError if a class is inside another or the splits are classes; call it at the end."""
        for folder in self._folders:
            for end in range(1, len(folder)):
                if folder[:end] in self._folders:
                    raise DataError(
                        "tar.class-in-class",
                        "{location}: there are images in {outer} and in {inner}: which of them is "
                        "the class?",
                        location=location,
                        outer="/".join(folder[:end]),
                        inner="/".join(folder),
                    )
        check_no_splits(location, self.classes)

    def _number(self, path: str, split: str, class_name: str, home: tuple[str, ...]) -> int:
        """The class's number. DataError if its images lie in another folder or tar, too.

        A folder called like its tar around all others does not count.
        """
        inside = home[1:] if home[0] == _stem(path) and len(home) > 1 else home
        known, first = self._homes.setdefault((split, class_name), (inside, home))
        if known != inside:
            raise DataError(
                "tar.class-in-two-folders",
                "{path}: {folder} and {other} have one name: if they are one class, write them "
                "into one folder; if not, rename one",
                path=path,
                folder="/".join(first),
                other="/".join(home),
            )
        number = self._numbers.setdefault(class_name, len(self.classes))
        if number == len(self.classes):
            self.classes.append(class_name)
        return number

    def _expect(self, layout: str, path: str, name: str) -> None:
        self._layout = self._layout or (layout, name)
        known, first = self._layout
        if known != layout:
            raise DataError(
                "tar.class-in-two-layouts",
                "{path}: {name!r} lies {layout}, but {other!r} {other_layout}: which one is the "
                "class?",
                path=path,
                name=name,
                layout=layout,
                other=first,
                other_layout=known,
            )


def _check_is_class(path: str, stem: str, name: str, *, alone: bool = False) -> None:
    """DataError unless a tar of loose images, such as `name`, is surely a class."""
    is_imagenets_way = name.startswith(stem) and not name[len(stem) : len(stem) + 1].isalnum()
    if stem.strip(".") and (is_imagenets_way or not (alone or stem[-1].isdigit())):
        return
    raise DataError(
        "tar.no-labels",
        "{path}: holds images but no labels: no .cls or .json beside {name!r}, no folder per "
        "class around it, and {stem!r} does not look like a class (its images would be named "
        "'{stem}_…'); ImageNet's own archives go through `trainyard data prepare`",
        path=path,
        name=name,
        stem=stem,
    )


def _folders_of(name: str) -> tuple[str, ...]:
    """The folders of a member, without those that are none."""
    return tuple(part for part in name.split("/")[:-1] if part not in ("", "."))


def _split_above(layout: str, name: str) -> str:
    """The split of the class's folder or inner tar; "" if it lies in none."""
    folders = _folders_of(name)
    return _split_of(folders if layout == _INNER_TARS else folders[:-1])


def _split_of(folders: tuple[str, ...]) -> str:
    """The split that the innermost folder with such a name stands for; "" if there is none."""
    for folder in reversed(folders):
        if found := split_named(folder):
            return found
    return ""


def _stem(name: str) -> str:
    return os.path.basename(name).removesuffix(".tar")


def _is_tar(name: str) -> bool:
    return name.endswith(".tar") and name[name.rfind("/") + 1] != "."


# --- the rows of a tar: their labels are numbers of its own folders and inner tars ---


_Homes = list[tuple[str, str]]
"""Layout and a member's name of each folder, or of each inner tar."""


def _add_home(homes: _Homes, layout: str, name: str) -> tuple[int, str]:
    """The number of a new home, and its split."""
    homes.append((layout, name))
    return len(homes) - 1, _split_above(layout, name)


class _Tar(NamedTuple):
    """What a tar holds; complete after its rows."""

    name: str
    rows: Iterable[FileRows]
    homes: _Homes
    left_out: LeftOut

    def whole(self) -> "_Tar":
        return self._replace(rows=[*self.rows])


def _read(place: ResolvedLocation, has_splits: bool, name: str) -> _Tar:
    file = _Tar(name, [], [], LeftOut())
    return file._replace(rows=_tar_rows(place.path(name), file, has_splits))


def _tar_rows(path: str, file: _Tar, has_splits: bool) -> Iterator[FileRows]:
    with BufferedTarReader(open_source(path)) as tar:
        for split, images in groupby(_images(tar, file, has_splits), key=itemgetter(3)):
            while chunk := list(islice(images, _CHUNK)):
                offsets, sizes, homes, _ = zip(*chunk, strict=True)
                columns = array("q", offsets), array("q", sizes), array("i", homes)
                yield FileRows(file.name, *columns, split)


def _images(
    tar: BufferedTarReader, file: _Tar, has_splits: bool
) -> Iterator[tuple[int, int, int, str]]:
    """Offset, size, home and split of each image; with splits, none outside of them.

    Adds homes and what is left out to `file`.
    """
    homes = file.homes
    found: dict[str, tuple[int, str, bool]] = {}  # by the image's folder
    hashes = array("q")  # of all names: 8 bytes for each of ten million
    has_masks = False
    for member in members(tar):
        hashes.append(hash(member.name))
        if _is_tar(member.name):
            home, split = _add_home(homes, _INNER_TARS, member.name)
            is_alike = homes[0][0] == _INNER_TARS  # else `_rows` refuses the layout
            if has_splits and not split:
                file.left_out.add(NO_SPLIT, member.name)
            elif is_alike:
                for image in _flat_images(tar, member, file.left_out):
                    yield image.offset, image.size, home, split
        elif is_image(member.name):
            folder = member.name.rpartition("/")[0]
            has_masks = has_masks or is_like_mask(member.name)
            if folder not in found:
                is_loose = not _folders_of(member.name)
                home, split = _add_home(homes, _FOLDERS, member.name)
                found[folder] = home, split, bool(split or is_loose or not has_splits)
            home, split, is_wanted = found[folder]
            if is_wanted and member.size:
                yield member.offset, member.size, home, split
            else:
                file.left_out.add(EMPTY if is_wanted else NO_SPLIT, member.name)
        else:
            file.left_out.add(why_left_out(member.name), member.name)
    _check_names(tar, several(hashes))
    for mask in masks_in([*filter(is_image, _names(tar))]) if has_masks else ():
        raise DataError(
            "tar.masks",
            "{path}: {name!r} is a mask beside its image, which would be an image of the class: "
            "unpack the tar, whose folders are read without masks",
            path=tar.name,
            name=mask,
        )


def _names(tar: BufferedTarReader) -> Iterator[str]:
    return (member.name for member in members(tar))


def _check_names(tar: BufferedTarReader, twice: set[int]) -> None:
    """DataError if a name is stored twice; `twice`: the hashes of such names."""
    seen = set[str]()
    for member in members(tar) if twice else ():
        if member.name in seen:
            raise DataError(
                "tar.member-stored-twice",
                "{path}: {name!r} is stored twice, as `tar -r` does for a newer file: unpack it, "
                "which keeps the last one, and write it anew",
                path=tar.name,
                name=member.name,
            )
        if hash(member.name) in twice:
            seen.add(member.name)


def _flat_images(tar: BufferedTarReader, inner: Member, left_out: LeftOut) -> Iterator[Member]:
    """The images of a tar inside a tar. DataError if a folder inside has another name than it."""
    stem, is_class = _stem(inner.name), False
    for member in members(tar, inner.offset, inner.offset + inner.size):
        folder, _, base = member.name.rpartition("/")
        if base.endswith((".tar", ".cls")):
            raise DataError(
                "tar.inner-not-class",
                "{path}: the tar {inner!r} inside holds {name!r}, but images of one class were "
                "expected; unpack the outer tar and name the inner ones",
                path=tar.name,
                inner=inner.name,
                name=base,
            )
        if is_image(base):
            if folder not in ("", ".", stem, f"./{stem}"):
                raise DataError(
                    "tar.inner-class-or-folder",
                    "{path}: the image {name!r} of the tar {inner!r} inside: is its class "
                    "{inner_name!r} or its folder?",
                    path=tar.name,
                    name=member.name,
                    inner=inner.name,
                    inner_name=stem,
                )
            if not is_class:
                _check_is_class(tar.name, stem, base)
                is_class = True
            yield member
        else:
            left_out.add(why_left_out(member.name), f"{inner.name}/{member.name}")


# --- the rows of all tars ---


def _rows(
    place: ResolvedLocation, tars: Iterable[_Tar], labels: _Labels, left_out: LeftOut
) -> Iterator[FileRows]:
    for tar in tars:
        path, known = place.path(tar.name), list[int]()
        for rows in tar.rows:
            _label(known, tar.homes, path, labels)
            yield rows._replace(labels=array("i", [known[home] for home in rows.labels]))
        _label(known, tar.homes, path, labels)  # inner tars without images
        left_out.update(tar.left_out)
    labels.check(place.location)


def _label(known: list[int], homes: Sequence[tuple[str, str]], path: str, labels: _Labels) -> None:
    """Adds the labels of the homes that have none yet."""
    known.extend(labels.of_home(path, *home) for home in homes[len(known) :])


FORMAT = Format(
    name="tar",
    recognises=recognises,
    scan=scan,
    splits_inside=splits_inside,
)
