"""WebDataset shards: tars in which consecutive members of one key are one sample.

A key is the member's path up to the first dot of its base name. Read are the image and `.cls`,
as ASCII digits (webdataset's writer) or 8 little-endian bytes; other members are ignored.
"""

from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import groupby

from trainyard.data.formats.scan import IMAGE_SUFFIXES, FileRows, Scan
from trainyard.data.formats.tar import Member, members
from trainyard.data.location import Place
from trainyard.data.source import open_source
from trainyard.errors import DataError

_SCAN_THREADS = 8
_MAX_LABEL = 2**24  # more classes than any data set has; a larger number is damage


def recognises(place: Place) -> bool:
    return bool(place.files(".tar"))


def scan(place: Place) -> Scan:
    names = place.files(".tar")
    return Scan(
        place=place,
        format="webdataset",
        classes=None,
        watched=place.watched(names),
        rows=_rows(place, names),
    )


def _rows(place: Place, names: tuple[str, ...]) -> Iterator[FileRows]:
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        yield from pool.map(partial(_shard_rows, place), names)


def _shard_rows(place: Place, name: str) -> FileRows:
    offsets, sizes, labels = array("q"), array("q"), array("i")
    path = place.path(name)
    with closing(open_source(path)) as tar:
        parts = (m for m in members(tar) if _is_image(m.name) or _is_label(m.name))
        for key, group in groupby(parts, key=lambda member: _key(member.name)):
            image, label = _sample(list(group), f"{path}: sample {key!r}")
            offsets.append(image.offset)
            sizes.append(image.size)
            labels.append(_label(tar.read(label.offset, min(label.size, 32)), path, key))
    return FileRows(name, offsets, sizes, labels)


def _key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.split(".", 1)[0]


def _is_image(name: str) -> bool:
    return _field(name) in IMAGE_SUFFIXES


def _is_label(name: str) -> bool:
    return _field(name) == ".cls"


def _field(name: str) -> str:
    """All after the key, in lower case: ".jpg" is the image, ".seg.png" is something else.

    Empty for a name without a key, such as the `._name` that macOS adds to tars.
    """
    key, dot, field = name.rpartition("/")[2].partition(".")
    return dot + field.lower() if key else ""


def _sample(group: list[Member], where: str) -> tuple[Member, Member]:
    """The image and the label among the members of one key."""
    images = [member for member in group if _is_image(member.name)]
    labels = [member for member in group if _is_label(member.name)]
    if len(images) != 1 or len(labels) != 1:
        found = ", ".join(member.name for member in group)
        raise DataError(f"{where}: expected one image and one .cls, found {found}")
    return images[0], labels[0]


def _label(content: bytes, path: str, key: str) -> int:
    digits = content.strip()
    if digits.isdigit():
        label = int(digits)
    elif len(content) == 8:
        label = int.from_bytes(content, "little", signed=True)
    else:
        label = -1
    if not 0 <= label <= _MAX_LABEL:
        raise DataError(f"{path}: sample {key!r}: {content[:20]!r} in .cls is no class number")
    return label
