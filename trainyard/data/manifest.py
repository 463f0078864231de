"""`dataset.json`: what `data pack` and `data prepare` say about the shards that they wrote.

It names the classes, which WebDataset and TFRecord hold as bare numbers, lists the files, which a
web server need not, and has their checksums, by which copies are checked.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard.data.source import is_remote, open_source
from trainyard.errors import DataError
from trainyard.files import write_text

FILE_NAME = "dataset.json"
_VERSION = 1


@dataclass(frozen=True)
class Shard:
    name: str  # relative to the manifest's folder
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    files: str
    """The shards as a brace list relative to the manifest's folder."""
    shards: tuple[Shard, ...]

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    format: str
    classes: tuple[str, ...] | None
    """Names by number; None where the source had none either."""
    splits: dict[str, Split]
    about: dict[str, Any] = field(default_factory=dict)
    """How it was made: source, seed, options, odd files."""


def read_manifest(folder: str) -> Manifest | None:
    """The manifest of a folder or URL; None if it has none."""
    name = os.path.join(folder, FILE_NAME)
    try:
        source = open_source(name)
    except OSError:
        return None
    try:
        text = source.read(0, source.size)
    finally:
        source.close()
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{name}: not a manifest of Trainyard's ({error})") from None


def manifest_of(root: str, names: tuple[str, ...]) -> Manifest | None:
    """The manifest that lists these files of a folder; it may lie in the folder or above it."""
    above, _, last = root.rstrip("/").rpartition("/")
    for folder, prefix in ((root, ""), (above, f"{last}/")):
        if not folder or (is_remote(root) and not is_remote(f"{folder}/")):
            continue
        manifest = read_manifest(folder)
        listed = (
            {s.name for split in manifest.splits.values() for s in split.shards} if manifest else ()
        )
        if any(prefix + name in listed for name in names):
            return manifest
    return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    tree = {"version": _VERSION} | dataclasses.asdict(manifest)
    write_text(folder / FILE_NAME, json.dumps(tree, indent=1) + "\n")


def _parse(tree: dict[str, Any]) -> Manifest:
    if tree["version"] != _VERSION:
        raise ValueError(f"version {tree['version']} instead of {_VERSION}")
    splits = {
        str(name): Split(str(split["files"]), tuple(Shard(**shard) for shard in split["shards"]))
        for name, split in tree["splits"].items()
    }
    classes = None if tree["classes"] is None else tuple(map(str, tree["classes"]))
    return Manifest(str(tree["format"]), classes, splits, dict(tree["about"]))
