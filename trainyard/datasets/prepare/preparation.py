"""Steps shared by the preparations of public data sets."""

import gzip
import hashlib
import io
import os
import shutil
import tarfile
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainyard.data.arrays import Bytes
from trainyard.data.decode.packed_record import record_of_pixels
from trainyard.data.formats.scan import FileRows, Scan
from trainyard.data.index.build import Progress, index_scan
from trainyard.data.index.table import Index, digest_of, load_index
from trainyard.data.storage.location import find_place
from trainyard.data.storage.manifest import FILE_NAME, Manifest
from trainyard.datasets.pack.journal import check_empty, is_begun
from trainyard.datasets.pack.pack import pack
from trainyard.datasets.pack.recode import Recode
from trainyard.datasets.pack.shards import PackOptions, Selection
from trainyard.errors import DataError
from trainyard.files import atomic_write, why_unwritable
from trainyard.printable import how_many, print_line

# One process writes a shard; a restart writes an unfinished shard again.
_SHARD_SAMPLES = {
    "webdataset": 1000,
    "hdf5": 50_000,
    "folder": 1000,
    "packed": 100_000,  # pixels of a small data set
}


def find_archive(source: Path, name: str, origin: str) -> Path:
    """The archive `name`, where `source` is its folder or the file itself."""
    path = source / name if source.is_dir() else source
    if not path.is_file() or path.name != name:
        raise DataError("prepare.missing-file", path=source, name=name, origin=origin)
    return path


def make_folder(path: Path) -> None:
    """Makes a folder and its parents. DataError if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(path, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        reason = why_unwritable(error, path)
    if reason:
        raise DataError(
            "prepare.folder-unwritable",
            "{path}: cannot be written ({reason}); choose another folder",
            path=path,
            reason=reason,
        )


@dataclass(frozen=True)
class Preparation:
    """The destination of a data set, and the options for writing it."""

    destination: Path
    counter: Callable[[str, int | None], AbstractContextManager[Progress]]
    """Shows the progress of a stage, given its description and its total if known."""
    format: str = "webdataset"
    seed: int = 0
    """Seed of the order of training images in the shards."""
    checksum: bool = True
    """True to accept only the official, complete archives."""
    workers: int = 1
    shard_samples: int | None = None
    """Samples per shard; by default a suitable number for the format."""

    @property
    def order(self) -> int | None:
        """The seed; None for a folder, whose files have no order."""
        return None if self.format == "folder" else self.seed

    def __post_init__(self) -> None:
        """DataError before any long work if the destination holds other data."""
        if self.destination.exists() and not self.destination.is_dir():
            raise DataError(
                "prepare.destination-is-file",
                "{path}: is a file; choose a new folder",
                path=self.destination,
            )
        is_ours = (self.destination / FILE_NAME).exists() or is_begun(self.destination)
        if self.destination.exists() and not is_ours:
            check_empty(self.destination)

    @property
    def folder(self) -> Path:
        """The folder of intermediate results for a restart; removed once all is packed."""
        folder = self.destination / ".prepare"
        make_folder(folder)
        return folder

    def check_archives(self, expected: Mapping[Path, str]) -> None:
        """Checks MD5 sums if `checksum` is set."""
        if not self.checksum:
            return
        megabytes = sum(path.stat().st_size for path in expected) // 10**6
        with self.counter("checking the archives' MD5 sums, MB", megabytes) as progress:
            check_md5(expected, lambda read: progress(read // 10**6))

    def index(self, scan: Scan, archives: Sequence[Path]) -> Index:
        """The index of a scan of these archives; the saved one if they have not changed."""
        stats = [(path, path.stat()) for path in archives]
        stamps = [
            [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in stats
        ]
        path = self.folder / f"{digest_of(stamps)[:16]}.index"
        with self.counter(f"reading the headers of {archives[0].name}", None) as progress:
            return load_index(path) or index_scan(scan, path, progress)

    def about(
        self, source: str, splits: Mapping[str, Selection], published: Mapping[str, int]
    ) -> dict[str, Any]:
        """The origin of a small data set; it is official with its sums and published counts."""
        is_whole = all(len(splits[name].ids) == count for name, count in published.items())
        return {"source": source, "official": self.checksum and is_whole}

    def pack(
        self,
        splits: dict[str, Selection],
        name: str,
        *,
        about: dict[str, Any],
        recode: Recode | None = None,
    ) -> Manifest:
        """Writes the shards, named after `name`, and removes intermediate results."""
        options = PackOptions(
            format=self.format,
            name=name,
            shard_samples=self.shard_samples or _SHARD_SAMPLES[self.format],
            recode=recode,
            workers=self.workers,
            pixels=self.format == "packed",
        )
        classes = splits["train"].index.classes
        total = sum(len(selection.ids) for selection in splits.values())
        with self.counter("packing", total) as progress:
            manifest = pack(
                splits, classes, self.destination, options, about=about, progress=progress
            )
        shutil.rmtree(self.folder)
        assert manifest is not None
        return manifest


def read_members(path: Path, wanted: Collection[str], max_bytes: int) -> dict[str, bytes]:
    """The contents of the members whose paths end in the `wanted` ones, or of files in a folder.

    DataError if one is missing, or if the archive unpacks to more than `max_bytes`.
    """
    if path.is_dir():
        files = {name: path / name for name in wanted if (path / name).is_file()}
        try:
            found = {name: file.read_bytes() for name, file in files.items()}
        except OSError as error:
            raise DataError("file.unreadable", path=error.filename, reason=error.strerror) from None
    else:
        found = _members(path, wanted, max_bytes)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(
            "prepare.missing-member", "{path}: holds no {member}", path=path, member=missing[0]
        )
    return found


def _members(path: Path, wanted: Collection[str], max_bytes: int) -> dict[str, bytes]:
    try:
        with gzip.open(path) as packed:
            unpacked = packed.read(max_bytes + 1)
        if len(unpacked) > max_bytes:
            raise DataError(
                "prepare.archive-too-large",
                "{path}: unpacks to more than the {size:,} bytes that such an archive ever has",
                path=path,
                size=max_bytes,
            )
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            return {
                name: unpacked[member.offset_data : member.offset_data + member.size]
                for member in tar
                for name in wanted
                if member.isreg() and f"/{member.name}".endswith(f"/{name}")
            }
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(
            "prepare.archive-unreadable",
            "{path}: cannot be read as a .tar.gz ({reason})",
            path=path,
            reason=str(error),
        ) from None


def check_md5(
    expected: Mapping[Path, str],
    progress: Callable[[int], None] = lambda _: None,
    *,
    chunk_bytes: int = 8 << 20,
) -> None:
    """DataError unless the files have these MD5 sums; the files are read in parallel.

    `progress` receives the bytes read so far.
    """
    is_over, lock, count = threading.Event(), threading.Lock(), 0

    def md5(path: Path) -> str:
        nonlocal count
        digest = hashlib.md5(usedforsecurity=False)
        with open(path, "rb", buffering=0) as file:
            while (chunk := file.read(chunk_bytes)) and not is_over.is_set():
                digest.update(chunk)
                with lock:
                    count += len(chunk)
                    progress(count)
        return digest.hexdigest()

    with ThreadPoolExecutor(max(len(expected), 1)) as pool:
        try:
            found = list(pool.map(md5, expected))
        finally:
            is_over.set()  # so that Ctrl-C does not wait for the end of a file of 150 GB
    for path, digest in zip(expected, found, strict=True):
        if digest != expected[path]:
            raise DataError(
                "prepare.wrong-md5",
                "{path}: its MD5 is {md5} instead of {expected}: it is incomplete, damaged or "
                "another release; download it again, or take it as it is with --no-checksum",
                path=path,
                md5=digest,
                expected=expected[path],
            )


class LabelledPixels(NamedTuple):
    """The images of a split and their labels."""

    pixels: Bytes  # (N, H, W, 3) or (N, H, W)
    labels: Bytes  # (N,)
    classes: list[str]


def select_pixels(
    preparation: Preparation, split: str, images: LabelledPixels, archive: Path, *, count: int
) -> Selection:
    """The images as records, class by class, in the order of an image folder.

    The records lie end to end in one file. It has the archive's time, so a restart makes the same
    one. Prints the number of images where it is not `count`, the published one.
    """
    if len(images.labels) != count:
        found = how_many(len(images.labels), "image")
        print_line(f"{archive}: {found} for {split}; the published data set has {count:,}")
    path = preparation.folder / f"{split}.records"
    with atomic_write(path) as file:
        sizes = [file.write(record_of_pixels(pixels)) for pixels in images.pixels]
    stat = archive.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    offsets = [0, *np.cumsum(sizes)[:-1].tolist()]
    rows = iter([FileRows(path.name, offsets, sizes, images.labels.tolist())])
    resolved = find_place(str(path))
    scan = Scan(resolved, "records", images.classes, resolved.names, rows)
    index = index_scan(scan, path.with_suffix(".index"))
    ids = np.argsort(index.label, kind="stable")
    return Selection(index, ids, index.label[ids])
