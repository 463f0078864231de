"""Files that appear complete or not at all, checksums, and the layout of a run directory."""

import glob
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainyard.errors import CheckpointError


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write in binary; it takes the place of `path` only once complete and on disk."""
    part = part_of(path)
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def part_of(path: Path) -> Path:
    """A passing name beside a path, hidden from readers, that nobody else uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def remove_parts(path: Path) -> None:
    """Remove what killed processes left under passing names beside a path."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        part.unlink(missing_ok=True)


def is_at(path: Path, fd: int) -> bool:
    """Whether an open file or folder still lies at a path, or was removed or replaced."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def fsync_folder(path: Path) -> None:
    """Make renames and new names inside a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Where Trainyard keeps what cannot lie beside the data: $TRAINYARD_CACHE or ~/.cache."""
    configured = os.environ.get("TRAINYARD_CACHE")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"


class JsonLines:
    """A file of one JSON object a line that survives kill -9: whole lines, appended at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            _drop_partial_line(path)

    def append(self, line: dict[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({key: _finite(value) for key, value in line.items()}) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_partial_line(path: Path) -> None:
    with open(path, "rb+") as file:
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run (design, section 6)."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine.jsonl"

    @property
    def predictions(self) -> Path:
        return self.path / "predictions.npz"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def stacks(self) -> Path:
        return self.path / "stacks"


def find_checkpoint(target: Path) -> tuple[Path, Path]:
    """The run directory and the checkpoint that a run or checkpoint path means.

    Of a run, its best checkpoint, or its latest. CheckpointError if there is none.
    """
    checkpoints = RunDirectory(target).checkpoints
    if checkpoints.is_dir():
        for name in ("best", "latest"):
            if (checkpoints / name).exists():
                return target, (checkpoints / name).resolve()
        raise CheckpointError(f"{target}: has no checkpoint yet")
    if (target / "manifest.json").is_file():
        return target.resolve().parent.parent, target.resolve()
    raise CheckpointError(f"{target}: neither a run directory nor a checkpoint")
