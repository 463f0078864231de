"""WebDataset shards: tars in which consecutive members of one key are one sample.

A key is the member's path up to the first dot of its base name. Read are the image and `.cls`,
as ASCII digits (webdataset's writer) or 8 little-endian bytes; other members are ignored.
"""

import glob
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path

from trainyard.data.formats.scan import IMAGE_SUFFIXES, FileRows, Scan
from trainyard.data.formats.tar import Member, members
from trainyard.data.location import is_file_list, list_files, location_root
from trainyard.errors import DataError

_SCAN_THREADS = 8
_MAX_LABEL = 2**24  # more classes than any data set has; a larger number is damage


def recognises(location: str) -> bool:
    if os.path.isdir(location):
        return any(Path(location).glob("*.tar"))
    return location.endswith(".tar") and is_file_list(location)


def scan(location: str) -> Scan:
    root = location_root(location)
    in_folder = os.path.isdir(location)
    shards = sorted(root.glob("*.tar")) if in_folder else list_files(location)
    names = [str(shard.relative_to(root)) for shard in shards]
    # Shards that a folder or a glob gains belong to it; a brace list names all it has.
    can_gain = in_folder or glob.has_magic(location)
    folders = {str(above) for name in names for above in Path(name).parents} if can_gain else ()
    return Scan(
        root=root,
        format="webdataset",
        classes=None,
        watched=(*sorted(folders), *names),
        num_files=len(names),
        rows=_rows(root, names),
    )


def _rows(root: Path, names: list[str]) -> Iterator[FileRows]:
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        yield from pool.map(partial(_shard_rows, root), names)


def _shard_rows(root: Path, name: str) -> FileRows:
    path = str(root / name)
    rows = FileRows(name, [], [], [])
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = (m for m in members(fd, path) if _is_image(m.name) or _is_label(m.name))
        for key, group in groupby(parts, key=lambda member: _key(member.name)):
            image, label = _sample(list(group), f"{path}: sample {key!r}")
            rows.offsets.append(image.offset)
            rows.sizes.append(image.size)
            rows.labels.append(_label(os.pread(fd, min(label.size, 32), label.offset), path, key))
    finally:
        os.close(fd)
    return rows


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
