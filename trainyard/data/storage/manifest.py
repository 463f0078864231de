"""`dataset.json`: the manifest that `data pack` and `data prepare` write beside shards.

It names the classes, which WebDataset and TFRecord store as bare numbers; it lists the files, which
a web server may not; and it holds their checksums, to check copies.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from trainyard.data.storage.open import open_source
from trainyard.data.storage.remote import retry
from trainyard.data.storage.source import Source, is_remote
from trainyard.errors import DataError
from trainyard.files import write_text
from trainyard.printable import print_line

FILE_NAME = "dataset.json"
_VERSION = 1
_BEGINNING = re.compile(rb'\s*\{\s*"version"\s*:')  # the first bytes that `write_manifest` writes

_Count = Annotated[int, Ge(0)]


@dataclass(frozen=True)
class Shard:
    name: str  # relative to the manifest's folder
    samples: _Count
    bytes: _Count
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
    """Names by number; None if the source has none."""
    splits: dict[str, Split]
    about: dict[str, Any] = field(default_factory=dict)
    """The origin of the shards: source, seed, options, odd files."""


@dataclass(frozen=True, kw_only=True)
class _File(Manifest):
    version: int


def read_manifest(folder: str, *, warns: bool = False, data: str = "") -> Manifest | None:
    """The manifest of a folder or URL; None if it has none, or its server does not give it.

    A file of the same name from another program does not count; `warns` reports it on stderr.
    `data`: a file of the data, if it is known. DataError for a damaged manifest.
    """
    name = os.path.join(folder, FILE_NAME)
    source = _open_optional(name, data or folder)
    if source is None:
        return None
    try:
        text = source.read(0, source.size)
    finally:
        source.close()
    if _is_ours(text):
        return _parse(name, text)
    if warns:
        print_line(f"{name}: not written by Trainyard; passed over")
    return None


def _open_optional(name: str, data: str) -> Source | None:
    """Opens a file that may be absent; None if it is, or the server fails with it alone.

    If the server is away, this waits until it serves the `data`, and then tries the file once more.
    """
    try:
        with retry.at_most(retry.OPTIONAL_S):
            return open_source(name)
    except (OSError, retry.Refused):
        return None
    except retry.GaveUp as error:
        failure = error
    with suppress(OSError, retry.Refused):
        open_source(data).close()
    try:
        with retry.at_most(0):
            return open_source(name)
    except retry.GaveUp:
        print_line(f"{failure}; passed over")
    except (OSError, retry.Refused):
        pass
    return None


def manifest_of(root: str, names: tuple[str, ...], *, warns: bool = False) -> Manifest | None:
    """The manifest that lists any of these files; it may lie in the folder or above it.

    For `warns` see `read_manifest`.
    """
    above, last = _above(root)
    for folder, prefix in ((root, ""), (above, f"{last}/")):
        if not folder or (is_remote(root) and folder.endswith(":/")):  # above a server
            continue
        data = os.path.join(root, names[0]) if names else root
        manifest = read_manifest(folder, warns=warns, data=data)
        listed = (
            {s.name for split in manifest.splits.values() for s in split.shards} if manifest else ()
        )
        if any(prefix + name in listed for name in names):
            return manifest
    return None


def _above(root: str) -> tuple[str, str]:
    """The folder or URL above a folder, which "train" has too, and the folder's name."""
    full = root if is_remote(root) else os.path.abspath(root)
    above, _, last = full.rstrip("/").rpartition("/")
    return above, last


def shards_listed(manifest: Manifest | None, root: str, names: Iterable[str]) -> dict[str, Shard]:
    """The entries of files of a folder, by name, in the manifest that `manifest_of` finds."""
    splits = manifest.splits.values() if manifest else ()
    shards = {shard.name: shard for split in splits for shard in split.shards}
    last = _above(root)[1]
    by_name = {name: shards.get(name) or shards.get(f"{last}/{name}") for name in names}
    return {name: shard for name, shard in by_name.items() if shard}


def is_inside(name: str) -> bool:
    """True if a name relative to a folder stays in it: no absolute path, no URL, no `..`."""
    return not (name.startswith("/") or "://" in name or ".." in name.split("/") or "\0" in name)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write dataset.json into a folder, atomically."""
    tree = {"version": _VERSION} | dataclasses.asdict(manifest)
    write_text(folder / FILE_NAME, json.dumps(tree, indent=1) + "\n")


def _is_ours(text: bytes) -> bool:
    """True for a manifest that Trainyard wrote, even a damaged one."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return _BEGINNING.match(text) is not None
    return isinstance(tree, dict) and {"format", "splits"} <= tree.keys()


def _parse(name: str, text: bytes) -> Manifest:
    # Loader processes import this module, and few read a manifest: pydantic doubles their start.
    from pydantic import TypeAdapter, ValidationError

    try:
        file = TypeAdapter(_File).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise _damaged(name, f"{where}: {first['msg'].lower()}") from None
    if file.version != _VERSION:
        raise DataError(
            "file.other-version",
            path=name,
            version=file.version,
            known=_VERSION,
            hint="",
        )
    for split in file.splits.values():
        for path in (split.files, *(shard.name for shard in split.shards)):
            if not is_inside(path):
                raise _damaged(name, f"{path!r} does not lie inside its folder")
    if file.classes is not None and len({*file.classes}) < len(file.classes):
        raise _damaged(name, "classes: a name appears twice")
    return Manifest(file.format, file.classes, file.splits, file.about)


def _damaged(name: str, why: str) -> DataError:
    return DataError(
        "manifest.damaged",
        "{path}: damaged ({reason}); restore it, or remove it to go without names and checksums",
        path=name,
        reason=why,
    )
