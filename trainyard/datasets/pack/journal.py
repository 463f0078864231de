"""The journal of a pack's finished shards, by which the same command resumes it after a kill."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainyard.data.storage.manifest import FILE_NAME, Manifest, Shard, read_manifest
from trainyard.errors import DataError
from trainyard.files import JsonLines, is_at

NAME = ".pack.jsonl"


@dataclass(frozen=True)
class Written:
    """A complete shard at the destination."""

    shard: Shard
    image_bytes: int
    odd: list[tuple[str, str]]
    """Kind and file of each unusual image in the shard."""


@dataclass(frozen=True)
class Identity:
    """The properties that must be equal for a pack to be resumed."""

    plan: str
    """SHA-256 of the settings and of every row to be written."""
    settings: dict[str, Any]


class Journal:
    """The first line identifies the pack; every other line names a finished shard."""

    def __init__(self, destination: Path, identity: Identity) -> None:
        self.path = destination / NAME
        self._lines = JsonLines(self.path)
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        self.is_resumed = bool(lines)
        if lines:
            _check_same(f"{destination}: holds an unfinished pack", lines[0], identity)
        else:
            check_empty(destination)
            self._lines.append(asdict(identity))
        self.done: dict[str, Written] = {}
        for line in lines[1:]:
            odd = [(kind, name) for kind, name in line["odd"]]
            written = Written(Shard(**line["shard"]), line["image_bytes"], odd)
            if _is_whole(destination, written.shard):
                self.done[written.shard.name] = written

    def add(self, written: Written) -> None:
        self._lines.append(asdict(written))
        self.done[written.shard.name] = written


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Locks a destination against other packs. DataError if another pack holds it."""
    path = destination / NAME
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise DataError(
                f"{destination}: another process is packing into it: wait for it, or choose "
                "another folder"
            ) from None
        except OSError:  # a file system without locks
            break
        if is_at(path, lock):
            break
        os.close(lock)  # of a pack that has just finished and removed the file
    try:
        yield
    finally:
        if not os.fstat(lock).st_size and is_at(path, lock):  # no pack was begun
            path.unlink()
        os.close(lock)


def finished(destination: Path, identity: Identity) -> Manifest | None:
    """The manifest of this very pack if it is complete. DataError for that of another pack."""
    manifest = read_manifest(str(destination))
    if manifest is None:
        return None
    known = {"plan": manifest.about.get("plan"), "settings": manifest.about}
    _check_same(f"{destination}: holds a data set", known, identity)
    for split in manifest.splits.values():
        for shard in split.shards:
            if not _is_whole(destination, shard):
                raise DataError(
                    f"{destination / shard.name}: is missing or truncated; remove "
                    f"{destination / FILE_NAME} and pack again"
                )
    return manifest


def _check_same(what: str, known: dict[str, Any], identity: Identity) -> None:
    if known["plan"] == identity.plan:
        return
    changed = [
        f"{key} {known['settings'].get(key)!r} instead of {value!r}"
        for key, value in identity.settings.items()
        if known["settings"].get(key) != value
    ]
    raise DataError(
        f"{what} made with {'; '.join(changed) or 'a source that has changed since'}: give the "
        "same settings, remove it, or choose another destination"
    )


def check_empty(destination: Path) -> None:
    """DataError if a destination holds files that a pack would overwrite."""
    found = next((name for name in sorted(os.listdir(destination)) if name[0] != "."), None)
    if found:
        raise DataError(
            f"{destination}: is not empty ({found}); choose a new folder, so that nothing is "
            "overwritten"
        )


def _is_whole(destination: Path, shard: Shard) -> bool:
    try:
        return (destination / shard.name).stat().st_size == shard.bytes
    except OSError:
        return False
