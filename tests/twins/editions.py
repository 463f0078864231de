"""Runs a row of the table by an edition of Trainyard, and what is left of it as plain values."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.twins.rows import Row, Words

FOLDER = Path(__file__).parent
# Keys of values that are measured, that name the edition, or that are gone from training reports.
_MEASURED = (
    *("seconds", "time", "eta", "eta_epoch", "images_per_s", "images_per_s_device", "data_wait"),
    *("memory", "mfu", "gpu_use", "gpu_power", "version", "commit", "started", "host", "machine"),
    *("images_per_s_loader", "update_ratio"),
)


class RowError(Exception):
    """A command of a row that fails; the text is its message."""


@dataclass(frozen=True)
class Edition:
    """The code in a folder, with its own extension in C."""

    name: str
    root: Path

    def outcome(self, row: Row, folder: Path) -> dict[str, Any]:
        """JSON, reports, weights and predictions, by name. `folder` is new, beside the data."""
        folder.mkdir(parents=True)
        found: dict[str, Any] = {}
        for number, words in enumerate(row.commands):
            if row.killed_at is not None and not number:
                self._killed(words, folder, row.killed_at)
            found[f"output {number}"] = self._output(words, folder)
        for run in sorted(path.parent for path in folder.glob("*/recipe.toml")):
            found |= {f"{run.name}: {key}": value for key, value in _of_run(run)}
        for path in sorted(folder.glob("*.safetensors")):
            found[path.name] = _digests(path)
        return found

    def command(self, words: Words) -> list[str]:
        if words[0].endswith(".py"):
            return [sys.executable, "-P", str(FOLDER / words[0]), *words[1:]]
        return [sys.executable, "-P", "-m", "trainyard", *words]

    def variables(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.root), "COLUMNS": "100", "NO_COLOR": "1"}

    def _output(self, words: Words, folder: Path) -> Any:
        done = subprocess.run(
            self.command(words), cwd=folder, env=self.variables(), capture_output=True, text=True
        )
        if done.returncode:
            raise RowError(f"{self.name}: {' '.join(words)}: {done.stderr.strip()[-300:]}")
        printed = done.stdout.replace(str(folder), ".")
        try:
            return _plain(json.loads(printed))
        except ValueError:
            return printed

    def _killed(self, words: Words, folder: Path, step: int) -> None:
        """Kills the command and all of its processes once it has reported a step."""
        process = subprocess.Popen(
            self.command(words),
            cwd=folder,
            env=self.variables(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while process.poll() is None and not any(
            row.get("step", 0) >= step for row in _lines(folder / "run/metrics.jsonl")
        ):
            time.sleep(0.02)
        if process.poll() is not None:
            raise SystemExit(f"{folder}: the run was over before it could be killed")
        for pid in [*_children(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from _children(child)


def _of_run(run: Path) -> Iterator[tuple[str, Any]]:
    reports = [row for row in _lines(run / "metrics.jsonl") if row.get("kind") in ("train", "val")]
    yield "reports", {f"{row['kind']} {row['step']}": _plain(row) for row in reports}
    latest = run / "checkpoints/latest"
    yield "checkpoint", latest.resolve().name
    for path in sorted(latest.glob("*.safetensors")):
        yield path.name, _digests(path)
    with np.load(run / "predictions.npz") as arrays:
        yield "predictions", {key: _digest(arrays[key]) for key in sorted(arrays)}


def _digests(path: Path) -> dict[str, str]:
    return {name: _digest(array) for name, array in sorted(load_file(path).items())}


def _digest(array: Any) -> str:
    kind = f"{array.dtype}{list(array.shape)}"
    return f"{kind} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]}"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be being written."""
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _plain(value: Any) -> Any:
    """A value without what is measured."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if key not in _MEASURED}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two outcomes differ, as texts."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(
                one.get(key), other.get(key), f"{where} / {key}" if where else key
            )
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, parts in enumerate(zip(one, other, strict=True)):
            yield from differences(*parts, f"{where} / {number}")
    elif one != other:
        yield f"{where}: {one!r:.80} is now {other!r:.80}"
