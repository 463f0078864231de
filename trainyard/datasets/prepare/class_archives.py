"""Archives with a tar per class: all inside another tar (fall11), or files of a folder."""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

from trainyard.data.formats.scan import FileRows
from trainyard.data.formats.tar import BufferedTarReader, Member, is_image, members
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.errors import DataError


class ClassImages(NamedTuple):
    """The images of a class in the order of their names."""

    name: str
    file: str  # the file that holds them, relative to the place's root
    images: list[Member]

    def rows(self, label: int) -> FileRows:
        offsets, sizes = [m.offset for m in self.images], [m.size for m in self.images]
        return FileRows(self.file, offsets, sizes, [label] * len(self.images))


def class_archives(place: ResolvedLocation) -> Iterator[ClassImages]:
    """The classes in stored order. DataError if one occurs twice."""
    seen = set()
    for file in place.files(".tar"):
        with closing(BufferedTarReader(open_source(place.path(file)))) as tar:
            for name, images in _classes(tar, file):
                if not name.strip(".") or name in seen:  # it becomes a folder's name
                    reason = "comes twice" if name in seen else "is no name of a class"
                    raise DataError(f"{place.path(file)}: {name!r} {reason}")
                seen.add(name)
                yield ClassImages(name, file, images)


def _classes(tar: BufferedTarReader, file: str) -> Iterator[tuple[str, list[Member]]]:
    own = []
    for member in members(tar):
        if member.name.endswith(".tar"):
            end = member.offset + member.size
            inside = members(tar, member.offset, end)
            yield _class_name(member.name), _sorted(m for m in inside if is_image(m.name))
        elif is_image(member.name):
            own.append(member)
    if own:
        yield _class_name(file), _sorted(own)


def _class_name(tar_name: str) -> str:
    return os.path.basename(tar_name).removesuffix(".tar")


def _sorted(images: Iterable[Member]) -> list[Member]:
    return sorted(images, key=lambda member: os.path.basename(member.name))
