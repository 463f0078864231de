"""Folders, tars and shards for tests, and what a location holds."""

import io
import itertools
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from trainyard.data import formats
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.location import find_place
from trainyard.data.storage.manifest import Manifest, Shard, Split, write_manifest

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


def random_shards(folder: Path, sizes: list[int]) -> tuple[Index, list[bytes]]:
    """Tars with `sizes` samples of random bytes each, and what each sample holds."""
    generator = np.random.default_rng(0)
    contents = []
    for number, size in enumerate(sizes):
        images = [generator.bytes(int(generator.integers(1, 3000))) for _ in range(size)]
        write_shard(folder / f"shard-{number:04d}.tar", [(image, 0) for image in images])
        contents += images
    return open_index(str(folder)), contents


def counted_shards(folder: Path, counts: list[int]) -> str:
    """WebDataset shards with so many samples each."""
    number = itertools.count()
    for shard, size in enumerate(counts):
        rows = [(b"image %d" % next(number), 0) for _ in range(size)]
        write_shard(folder / f"train-{shard:03d}.tar", rows)
    return str(folder)


def named_shards(folder: Path, counts: list[int], names: tuple[str, ...]) -> str:
    place = counted_shards(folder, counts)
    paths = [folder / f"train-{number:03d}.tar" for number in range(len(counts))]
    sizes = [path.stat().st_size for path in paths]
    rows = zip(paths, counts, sizes, strict=True)
    shards = tuple(Shard(path.name, count, size, "") for path, count, size in rows)
    splits = {"train": Split(f"train-{{000..{len(counts) - 1:03d}}}.tar", shards)}
    write_manifest(folder, Manifest("webdataset", names, splits))
    return place
