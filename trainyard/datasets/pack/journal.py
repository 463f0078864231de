"""Journals of finished shards, by which the same command resumes a pack after a kill.

A pack in parts has a journal for each part; the pack without a part joins them.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.data.storage.manifest import FILE_NAME, Manifest, Shard, read_manifest
from trainyard.errors import DataError
from trainyard.files import JsonLines, is_at

NAME = ".pack.jsonl"
_OF_PART = re.compile(r"\.pack-(\d+)-of-(\d+)\.jsonl")


class Part(NamedTuple):
    """One of several shares of a pack, for machines that share the destination."""

    number: int  # from 1
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def owns(self, place: int) -> bool:
        """True for the shard at a place in the plan: every `of`th one."""
        return place % self.of == self.number - 1


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

    def __init__(self, destination: Path, identity: Identity, part: Part | None = None) -> None:
        """Of a locked destination. DataError if it holds anything but this pack."""
        self.path, self.part = path_of(destination, part), part
        self._lines = JsonLines(self.path)
        lines = _lines(self.path)
        self.is_resumed = bool(lines)
        if lines:
            _check_same(f"{destination}: holds an unfinished pack", lines[0], identity)
        else:
            if not _has_others(destination, identity, part):
                check_empty(destination)
            self._lines.append(asdict(identity))
        self.done = _done(destination, lines)

    def add(self, written: Written) -> None:
        self._lines.append(asdict(written))
        self.done[written.shard.name] = written


def path_of(destination: Path, part: Part | None) -> Path:
    """The journal's place."""
    name = NAME if part is None else f".pack-{part.number}-of-{part.of}.jsonl"
    return destination / name


def parts_in(destination: Path) -> list[Part]:
    """The parts that have a journal at a destination."""
    matches = (_OF_PART.fullmatch(name) for name in sorted(os.listdir(destination)))
    return sorted(Part(int(match[1]), int(match[2])) for match in matches if match)


def joined(destination: Path, identity: Identity, names: list[str]) -> dict[str, Written]:
    """The shards of all parts, by name; `names` are the plan's, in order.

    DataError, which names the parts, if some have not finished, or are of another pack.
    """
    parts = parts_in(destination)
    count = _check_one_count(destination, parts)
    done: dict[str, Written] = {}
    for part in parts:
        with locked(destination, part):  # else it is still at work
            lines = _lines(path_of(destination, part))
        for line in lines[:1]:
            _check_same(f"{destination}: holds part {part} of a pack", line, identity)
        done |= _done(destination, lines)
    left = {place % count + 1 for place, name in enumerate(names) if name not in done}
    if left:
        which = ", ".join(f"{number}/{count}" for number in sorted(left)[:5])
        more = f" and {len(left) - 5:,} more" if len(left) > 5 else ""
        raise DataError(
            f"{destination}: not finished: {which}{more}: give the same command with --part for "
            "each of them, then once without"
        )
    return done


def remove_journals(destination: Path) -> None:
    """Removes the journals of a finished pack."""
    for part in (None, *parts_in(destination)):
        path_of(destination, part).unlink(missing_ok=True)


def _has_others(destination: Path, identity: Identity, part: Part | None) -> bool:
    """True if other parts of this pack have begun. DataError for parts of another pack."""
    if part is None:
        return False
    if (destination / NAME).exists():
        raise DataError(
            f"{destination}: holds an unfinished pack that is not in parts: give the same command "
            "without --part, or choose another destination"
        )
    # A part may publish its first shard meanwhile; its journal has been there before.
    is_empty = all(name.startswith(".") for name in os.listdir(destination))
    parts = [other for other in parts_in(destination) if other != part]
    _check_one_count(destination, [part, *parts])
    others = [lines[0] for other in parts if (lines := _lines(path_of(destination, other)))]
    for line in others:
        _check_same(f"{destination}: holds parts of a pack", line, identity)
    return bool(others) or is_empty


def _check_one_count(destination: Path, parts: list[Part]) -> int:
    counts = {part.of for part in parts}
    if len(counts) > 1:
        either = " and ".join(map(str, sorted(counts)))
        raise DataError(
            f"{destination}: holds parts of packs in {either} parts: keep to one number, or choose "
            "another destination"
        )
    return counts.pop()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal: another process may be writing the last one."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _done(destination: Path, lines: list[dict[str, Any]]) -> dict[str, Written]:
    """The complete shards that a journal names."""
    found = {}
    for line in lines[1:]:
        odd = [(kind, name) for kind, name in line["odd"]]
        written = Written(Shard(**line["shard"]), line["image_bytes"], odd)
        if _is_whole(destination, written.shard):
            found[written.shard.name] = written
    return found


@contextmanager
def locked(destination: Path, part: Part | None = None) -> Iterator[None]:
    """Locks a destination, or a part, against other packs. DataError if another one holds it."""
    path = path_of(destination, part)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise DataError(
                f"{destination}: another process is packing {f'part {part}' if part else ''} into "
                "it: wait for it, or choose another folder".replace("  ", " ")
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
