"""What the preparations of the public data sets share."""

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
from trainyard.data.index import Index, load_index
from trainyard.data.indexing import Progress, index_scan
from trainyard.data.manifest import FILE_NAME, Manifest
from trainyard.data.pack.journal import NAME as JOURNAL
from trainyard.data.pack.journal import check_empty
from trainyard.data.pack.pack import PackOptions, Selection, pack
from trainyard.data.pack.recode import Recode
from trainyard.data.prepare.checksums import check_md5
from trainyard.errors import DataError
from trainyard.files import why_unwritable

# A shard is written by one process, and is what a restart writes again.
_SHARD_SAMPLES = {
    "webdataset": 1000,
    "tfrecord": 1252,  # ImageNet-1K in 1024 shards, as usual
    "hdf5": 50_000,
    "folder": 1000,
}


def find_archive(source: Path, name: str, origin: str) -> Path:
    """The archive `name`, of which `source` is the folder or the file itself."""
    path = source / name if source.is_dir() else source
    if not path.is_file() or path.name != name:
        raise DataError(f"{source}: there is no {name} here; it can be had from {origin}")
    return path


def make_folder(path: Path) -> None:
    """Make a folder, and those above it. DataError if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(path, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        reason = why_unwritable(error, path)
    if reason:
        raise DataError(f"{path}: cannot be written ({reason}); choose another folder")


@dataclass(frozen=True)
class Preparation:
    """Where a data set comes to lie, and how."""

    destination: Path
    counter: Callable[[str, int | None], AbstractContextManager[Progress]]
    """Shows one stage: what it is, and how many there will be if that is known."""
    format: str = "webdataset"
    seed: int = 0
    """Of the order in which shards hold the training images."""
    checksum: bool = True
    """Take nothing but the official archives, whole."""
    workers: int = 1
    shard_samples: int | None = None
    """By default what suits the format."""

    @property
    def order(self) -> int | None:
        """The seed, but None for a folder, in which files have no order."""
        return None if self.format == "folder" else self.seed

    def __post_init__(self) -> None:
        """DataError before any long work if something else lies there."""
        if self.destination.exists() and not self.destination.is_dir():
            raise DataError(f"{self.destination}: is a file; choose a new folder")
        ours = (self.destination / FILE_NAME, self.destination / JOURNAL)
        if self.destination.exists() and not any(path.exists() for path in ours):
            check_empty(self.destination)

    @property
    def folder(self) -> Path:
        """For what a restart need not do again; gone once all is packed."""
        folder = self.destination / ".prepare"
        make_folder(folder)
        return folder

    def check_archives(self, expected: Mapping[Path, str]) -> None:
        """Check MD5 sums if wanted. They are remembered in the destination."""
        if not self.checksum:
            return
        make_folder(self.destination)
        megabytes = sum(path.stat().st_size for path in expected) // 10**6
        with self.counter("checking the archives' MD5 sums, MB", megabytes) as progress:
            memory = self.destination / ".md5.json"
            check_md5(expected, memory, lambda read: progress(read // 10**6))

    def index(self, scan: Scan, archives: Sequence[Path]) -> Index:
        """The index of a scan that follows from these archives."""
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
        """Write the shards, named after `name`, and remove what was kept for a restart."""
        options = PackOptions(
            format=self.format,
            name=name,
            shard_samples=self.shard_samples or _SHARD_SAMPLES[self.format],
            recode=recode,
            workers=self.workers,
        )
        classes = splits["train"].index.classes
        total = sum(len(selection.ids) for selection in splits.values())
        with self.counter("packing", total) as progress:
            manifest = pack(
                splits, classes, self.destination, options, about=about, progress=progress
            )
        shutil.rmtree(self.folder)
        return manifest
