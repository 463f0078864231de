"""Journals of finished shards, by which the same command resumes a pack after a kill.

A pack in parts has a journal for each part; the pack without a part joins them.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainyard.data.storage.manifest import FILE_NAME, Manifest, Shard, read_manifest
from trainyard.datasets.parts import Identity, Journals, Part, whole_lines
from trainyard.errors import DataError
from trainyard.files import JsonLines


def journals_in(destination: Path) -> Journals:
    """The journals of a pack into a destination."""
    return Journals(
        destination,
        ".pack",
        noun="a pack",
        doing="packing into it",
        otherwise="remove it, or choose another destination",
    )


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
        journals = journals_in(destination)
        self.path, self.part = journals.path(part), part
        self._lines = JsonLines(self.path)
        lines = [*whole_lines(self.path)]
        self.is_resumed = bool(lines)
        if lines:
            journals.check_same(f"{destination}: holds an unfinished pack", lines[0], identity)
        else:
            if not _has_others(journals, identity, part):
                check_empty(destination)
            self._lines.append(asdict(identity))
        self.done = _done(destination, lines)

    def add(self, written: Written) -> None:
        self._lines.append(asdict(written))
        self.done[written.shard.name] = written


def joined(destination: Path, identity: Identity, names: list[str]) -> dict[str, Written]:
    """The shards of all parts, by name; `names` are the plan's, in order.

    DataError, which names the parts, if some have not finished, or are of another pack.
    """
    journals = journals_in(destination)
    parts = journals.parts()
    count = journals.count(parts)
    done: dict[str, Written] = {}
    for part in parts:
        with journals.locked(part):  # else it is still at work
            lines = [*whole_lines(journals.path(part))]
        for line in lines[:1]:
            journals.check_part(part, line, identity)
        done |= _done(destination, lines)
    left = {place % count + 1 for place, name in enumerate(names) if name not in done}
    if left:
        raise journals.unfinished(left, count)
    return done


def _has_others(journals: Journals, identity: Identity, part: Part | None) -> bool:
    """True if other parts of this pack have begun. DataError for parts of another pack."""
    if part is None:
        return False
    if journals.path(None).exists():
        raise DataError(
            f"{journals.folder}: holds an unfinished pack that is not in parts: give the same "
            "command without --part, or choose another destination"
        )
    # A part may publish its first shard meanwhile; its journal has been there before.
    is_empty = all(name.startswith(".") for name in os.listdir(journals.folder))
    return journals.check_others(part, identity) or is_empty


def _done(destination: Path, lines: list[dict[str, Any]]) -> dict[str, Written]:
    """The complete shards that a journal names."""
    found = {}
    for line in lines[1:]:
        odd = [(kind, name) for kind, name in line["odd"]]
        written = Written(Shard(**line["shard"]), line["image_bytes"], odd)
        if _is_whole(destination, written.shard):
            found[written.shard.name] = written
    return found


def finished(destination: Path, identity: Identity) -> Manifest | None:
    """The manifest of this very pack if it is complete. DataError for that of another pack."""
    manifest = read_manifest(str(destination))
    if manifest is None:
        return None
    known = {"plan": manifest.about.get("plan"), "settings": manifest.about}
    about = f"{destination}: holds a data set"
    journals_in(destination).check_same(about, known, identity)
    for split in manifest.splits.values():
        for shard in split.shards:
            if not _is_whole(destination, shard):
                raise DataError(
                    f"{destination / shard.name}: is missing or truncated; remove "
                    f"{destination / FILE_NAME} and pack again"
                )
    return manifest


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
