"""Journals of finished shards, by which the same command resumes a pack after a kill.

Each part of a pack has a journal of its own. All of them count: whoever packs without a part writes
the shards that are left.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.data.storage.manifest import FILE_NAME, Manifest, Shard, read_manifest
from trainyard.errors import DataError
from trainyard.files import JsonLines, is_at, open_own, why_unwritable

_NAME = ".pack.jsonl"
# What a line of the wrong kind raises.
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class Part(NamedTuple):
    """One of several shares of the shards."""

    number: int  # from 1
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def owns(self, position: int) -> bool:
        """True for the shard at a place in the list: every `of`th one."""
        return position % self.of == self.number - 1


@dataclass(frozen=True)
class Identity:
    """The properties that must be equal for a pack to be resumed."""

    plan: str
    """SHA-256 of the settings and of the data."""
    settings: dict[str, Any]


@dataclass(frozen=True)
class Written:
    """A complete shard at the destination."""

    shard: Shard
    image_bytes: int
    odd: list[tuple[str, str]]
    """Kind and file of each unusual image in the shard."""


class Journal:
    """The first line identifies the pack; every other line names a finished shard."""

    def __init__(self, destination: Path, identity: Identity, part: Part | None = None) -> None:
        """The journal of a locked destination. DataError if that holds anything but this pack."""
        # Another part may publish its first shard meanwhile; its journal has been there before.
        is_empty = all(name.startswith(".") for name in os.listdir(destination))
        self.path, self.part = _path(destination, part), part
        self._lines = JsonLines(self.path)
        self.done: dict[str, Written] = {}
        """The complete shards of all parts, by name."""
        self.is_resumed = False
        for path in _paths(destination):
            self._read(destination, path, identity)
        if not self.is_resumed and not is_empty:
            check_empty(destination)
        if not self.path.stat().st_size:
            self._lines.append(asdict(identity))

    def add(self, written: Written) -> None:
        self._lines.append(asdict(written))
        self.done[written.shard.name] = written

    def _read(self, destination: Path, path: Path, identity: Identity) -> None:
        """Counts the shards in a journal. DataError if it is damaged, or that of another pack."""
        with open(path, encoding="utf-8", errors="replace", opener=open_own) as file:
            # Another process may be writing the last line.
            lines = [line for line in file if line.endswith("\n")]
        try:
            entries = [*map(json.loads, lines)]
            if entries:
                _check_same(destination, "an unfinished pack", entries[0], identity)
                self.is_resumed = True
            for entry in entries[1:]:
                odd = [(kind, name) for kind, name in entry["odd"]]
                written = Written(Shard(**entry["shard"]), int(entry["image_bytes"]), odd)
                if _is_whole(destination, written.shard):
                    self.done[written.shard.name] = written
        except _DAMAGE:
            raise DataError(
                "pack.journal-damaged", "{path}: damaged: remove it", path=path
            ) from None


def is_begun(destination: Path) -> bool:
    """True if a destination holds an unfinished pack."""
    return bool(_paths(destination))


def remove_journals(destination: Path) -> None:
    """Removes the journals of a finished pack."""
    for path in _paths(destination):
        path.unlink()


def finished(destination: Path, identity: Identity) -> Manifest | None:
    """The manifest of this very pack if it is complete. DataError for that of another pack."""
    manifest = read_manifest(str(destination))
    if manifest is None:
        return None
    known = {"plan": manifest.about.get("plan"), "settings": manifest.about}
    _check_same(destination, "a data set", known, identity)
    for split in manifest.splits.values():
        for shard in split.shards:
            if not _is_whole(destination, shard):
                raise DataError(
                    "pack.shard-incomplete",
                    "{path}: is missing or truncated; remove {manifest} and pack again",
                    path=destination / shard.name,
                    manifest=destination / FILE_NAME,
                )
    return manifest


def check_empty(destination: Path) -> None:
    """DataError if a destination holds files that a pack would overwrite."""
    present = next((name for name in sorted(os.listdir(destination)) if name[0] != "."), None)
    if present:
        raise DataError(
            "pack.destination-not-empty",
            "{path}: is not empty ({name}); choose a new folder, so that nothing is overwritten",
            path=destination,
            name=present,
        )


@contextmanager
def locked(destination: Path, part: Part | None = None) -> Iterator[None]:
    """Locks a destination, or what a part writes to it. DataError if another process holds it."""
    with ExitStack() as stack:
        kind = fcntl.LOCK_EX if part is None else fcntl.LOCK_SH  # parts work beside each other
        stack.enter_context(_lock(_path(destination, None), kind))
        if part is not None:
            lock = _lock(_path(destination, part), fcntl.LOCK_EX, part)
            stack.enter_context(lock)
        yield


@contextmanager
def _lock(path: Path, kind: int, part: Part | None = None) -> Iterator[None]:
    while True:
        try:
            lock = open_own(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            reason = why_unwritable(error, path)
            raise DataError("file.unwritable", path=path.parent, reason=reason) from None
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if part is None:
                raise DataError(
                    "pack.in-use",
                    "{path}: another process is packing into it: wait for it",
                    path=path.parent,
                ) from None
            raise DataError(
                "pack.part-in-use",
                "{path}: another process is packing into it, part {part}: wait for it",
                path=path.parent,
                part=part,
            ) from None
        except OSError:  # a file system without locks
            break
        if is_at(path, lock):
            break
        os.close(lock)  # of work that has just finished and removed the file
    try:
        yield
    finally:
        if not os.fstat(lock).st_size and is_at(path, lock):  # no work was begun
            with suppress(OSError):  # another part holds it; the last one removes it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        os.close(lock)


def _path(destination: Path, part: Part | None) -> Path:
    name = _NAME if part is None else f".pack-{part.number}-of-{part.of}.jsonl"
    return destination / name


def _paths(destination: Path) -> list[Path]:
    """The journals of a pack and of its parts."""
    return sorted([*destination.glob(_NAME), *destination.glob(".pack-*-of-*.jsonl")])


def _check_same(destination: Path, what: str, known: dict[str, Any], identity: Identity) -> None:
    """DataError unless the `known` identity, of what a destination holds, is this one."""
    if known.get("plan") == identity.plan:
        return
    settings = known.get("settings")
    before: dict[str, Any] = settings if isinstance(settings, dict) else {}
    changed = [
        f"{key} {before.get(key)!r} instead of {value!r}"
        for key, value in identity.settings.items()
        if before.get(key) != value
    ]
    raise DataError(
        "pack.settings-differ",
        "{path}: holds {what} made with {changes}: give the same settings, or remove it, or "
        "choose another destination",
        path=destination,
        what=what,
        changes="; ".join(changed) or "a source that has changed since",
    )


def _is_whole(destination: Path, shard: Shard) -> bool:
    try:
        return (destination / shard.name).stat().st_size == shard.bytes
    except OSError:
        return False
