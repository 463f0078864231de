"""Steps shared by the preparations of public data sets."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.data.formats.scan import Scan
from trainyard.data.index.build import Progress, index_scan
from trainyard.data.index.table import Index, load_index
from trainyard.data.storage.manifest import FILE_NAME, Manifest
from trainyard.datasets.pack.journal import check_empty, is_begun
from trainyard.datasets.pack.pack import PackOptions, Selection, pack
from trainyard.datasets.pack.recode import Recode
from trainyard.datasets.prepare.checksums import check_md5
from trainyard.errors import DataError
from trainyard.files import why_unwritable

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
        raise DataError("prepare.folder-unwritable", path=path, reason=reason)


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
            raise DataError("prepare.destination-is-file", path=self.destination)
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
        stamps = [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        digest = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
        path = self.folder / f"{digest[:16]}.index"
        with self.counter(f"reading the headers of {archives[0].name}", None) as progress:
            return load_index(path) or index_scan(scan, path, progress)

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
        return manifest
