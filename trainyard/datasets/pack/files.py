"""Files with temporary names, renamed to their own once they are complete and on disk."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainyard.data.formats.scan import EncodedSample
from trainyard.datasets.pack.journal import Part
from trainyard.datasets.pack.shards import ShardJob
from trainyard.files import fsync, part_of, remove_parts

Outputs = list[tuple[Path, Path]]
"""Temporary and final paths."""


def publish(outputs: Outputs) -> None:
    """Renames complete files to their final names, the first one last."""
    try:
        for part, final in reversed(outputs):
            os.replace(part, final)
            fsync(final.parent)
    except BaseException:
        remove(outputs)
        raise


def remove(outputs: Outputs) -> None:
    """Removes the temporary files of outputs that are not published."""
    for part, _ in outputs:
        part.unlink(missing_ok=True)


def remove_stale(destination: Path, jobs: Sequence[ShardJob], part: Part | None) -> None:
    """Removes the temporary files of a killed process; of a part, only those of its shards."""
    if part is not None:  # other parts may be at work
        for job in jobs:
            remove_parts(destination / job.name)
            remove_parts(destination / "idx_files" / f"{job.name}.idx")
        return
    for folder, _, names in os.walk(destination):
        for name in names:
            if name.startswith(".") and name.endswith(".part"):
                os.unlink(os.path.join(folder, name))


def write_folder(
    listing: Path, samples: Iterable[EncodedSample], root: Path, folders: Sequence[str]
) -> None:
    """Writes each sample as a file in its class's folder, and a list as `sha256sum` does."""
    written = []
    with open(listing, "x", encoding="utf-8", errors="surrogateescape") as lines:
        for sample in samples:
            name = f"{folders[sample.label]}/{sample.key}{sample.suffix}"
            _write_file(root / name, sample.image)
            written.append(root / name)
            lines.write(f"{hashlib.sha256(sample.image).hexdigest()}  {name}\n")
    for path in written:  # after all writes: the first sync flushes most of them at once
        fsync(path)
    for folder in sorted({path.parent for path in written}):
        fsync(folder)


def _write_file(path: Path, content: bytes) -> None:
    part = part_of(path)
    try:
        with open(part, "xb") as file:  # buffered: else a full disk may cut the write short
            file.write(content)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
