"""Folders, tars and shards for tests, and what a location holds."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from trainyard.data import formats
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.location import find_place

Patch = pytest.MonkeyPatch

TAR_FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]

Row = tuple[bytes, int]  # the stored bytes and the label
Stored = list[tuple[str, bytes]]  # class name and encoded image of each sample, in stored order


def read_rows(location: str | Path) -> list[Row]:
    """Every sample of a location, its bytes read from where the scan says they are."""
    scan = formats.scan(find_place(str(location)))
    rows = []
    for file in scan.rows:
        content = Path(scan.place.path(file.path)).read_bytes()
        for offset, size, label in zip(file.offsets, file.sizes, file.labels, strict=True):
            rows.append((content[offset : offset + size], label))
    return rows


def stored(data: str | Path | Index) -> Stored:
    """Every sample of an index, or of a location by a new index of it."""
    index = data if isinstance(data, Index) else build_index(str(data))
    reader = Reader(index)
    return [(index.classes[index.label[n]], reader.read(n)) for n in range(len(index))]


def open_splits(location: str | Path) -> dict[str, Index]:
    return {split: open_index(place) for split, place in find_splits(str(location)).items()}


def write_files(folder: Path, files: Mapping[str, bytes] | Iterable[str]) -> str:
    """Files by their names; those without a content say their name."""
    if not isinstance(files, Mapping):
        files = {name: f"the content of {name}".encode() for name in files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def write_tar(
    path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_shard(path: Path, rows: Iterable[Row], *, suffix: str = "jpg") -> Path:
    """A shard of WebDataset; the key of each sample is its number."""
    members = []
    for number, (image, label) in enumerate(rows):
        members += [(f"{number:03d}.{suffix}", image), (f"{number:03d}.cls", b"%d" % label)]
    return write_tar(path, members)


def sealed(header: bytes) -> bytes:
    """A header with the checksum that it should have."""
    blank = header[:148] + b" " * 8 + header[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]
