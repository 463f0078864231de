"""Reads an archive that has a tar for each class inside it, as ILSVRC2012_img_train.tar."""

import os
from collections.abc import Iterator
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
    """The classes in stored order. DataError if one occurs twice, or a member is no class."""
    seen = set()
    [file] = place.names
    with closing(BufferedTarReader(open_source(place.path(file)))) as tar:
        for member in members(tar):
            if not member.name.endswith(".tar"):
                raise DataError("prepare.not-a-class-tar", path=place.path(file), name=member.name)
            name = os.path.basename(member.name).removesuffix(".tar")
            if not name.strip("."):  # it becomes a folder's name
                raise DataError("prepare.not-a-class-name", path=place.path(file), name=name)
            if name in seen:
                raise DataError("prepare.class-twice", path=place.path(file), name=name)
            seen.add(name)
            inside = members(tar, member.offset, member.offset + member.size)
            images = [image for image in inside if is_image(image.name)]
            yield ClassImages(name, file, sorted(images, key=_by_name))


def _by_name(member: Member) -> str:
    return os.path.basename(member.name)
