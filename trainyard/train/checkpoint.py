"""Checkpoints: complete or absent, checksummed, newest good one first.

checkpoints/step-00001234/
    model.safetensors   the weights, for anyone
    ema.safetensors     their moving average, where there is one
    training.pt         optimizer, averager, loss scale, and the weights in training where those
                        to use are others (schedule-free); loaded with weights_only
    progress.json       version, step, clock, evaluations, what was skipped
    manifest.json       SHA-256 of each file above
checkpoints/latest -> step-00001234        checkpoints/best -> step-00001000
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from trainyard.averaging.base import Averager
from trainyard.errors import CheckpointError
from trainyard.files import fsync_folder, part_of, sha256
from trainyard.monitor.clock import Clock
from trainyard.train.guard import Guard
from trainyard.train.optimizer_state import (
    evaluation_weights,
    has_own_weights,
    put_optimizer,
    save_optimizer,
)
from trainyard.train.update import LossScale

VERSION = 2
_MODEL, _EMA, _TRAINING, _PROGRESS = _FILES = (
    "model.safetensors",
    "ema.safetensors",
    "training.pt",
    "progress.json",
)


@dataclass
class TrainState:
    """All that is saved, and nothing that can be worked out from the recipe."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    averager: Averager
    ema: nn.Module | None
    scale: LossScale
    guard: Guard
    clock: Clock
    classes: list[str]
    step: int = 0
    skipped: int = 0
    """Samples of the stream that were passed over when the weights went back."""
    roll_backs: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    """The newest evaluation and its step."""
    best: dict[str, Any] = field(default_factory=dict)
    """The evaluation with the highest top1 so far and its step."""


def save_checkpoint(state: TrainState, folder: Path, *, keep: int) -> Path:
    """Write `state` to folder/step-…, then move `latest` to it and drop all but `keep` old ones."""
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    final = folder / f"step-{state.step:08d}"
    part = part_of(final)
    try:
        _write(state, part)
        # One of this step is there if it was damaged, or if its evaluation is being made up for.
        old = _hide(final) if final.exists() else None
        os.replace(part, final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    fsync_folder(folder)
    if old is not None:
        shutil.rmtree(old)
    point(folder / "latest", final)
    _prune(folder, keep)
    return final


def load_checkpoint(state: TrainState, path: Path) -> None:
    """Put a verified checkpoint's contents into `state`."""
    progress = read_progress(path)
    put_weights(state.model, load_weights(path), path)
    if state.ema is not None:
        if not (path / _EMA).exists():
            raise CheckpointError(f"{path}: has no {_EMA}, its run had no model.ema_decay")
        put_weights(state.ema, load_weights(path, ema=True), path)
    training = _load_training(path)
    if training["weights"] is not None:
        put_weights(state.model, training["weights"], path)
    put_optimizer(state.optimizer, training["optimizer"], path)
    state.averager.load_state_dict(training["averager"])
    state.scale.load_state_dict(training["scale"])
    state.guard.load_state_dict(progress["guard"])
    state.clock.load_state_dict(progress["clock"])
    state.step, state.skipped = progress["step"], progress["skipped"]
    state.roll_backs = progress["roll_backs"]
    state.last, state.best = progress["last"], progress["best"]


def load_weights(path: Path, *, ema: bool = False) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, or their moving average."""
    try:
        return load_file(path / (_EMA if ema else _MODEL))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _load_training(path: Path) -> dict[str, Any]:
    try:
        training: dict[str, Any] = torch.load(
            path / _TRAINING, map_location="cpu", weights_only=True
        )
    except (OSError, RuntimeError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]  # torch goes on about how to switch safety off
        raise CheckpointError(f"{path}: training.pt cannot be read: {reason}") from None
    return training


def read_progress(path: Path) -> dict[str, Any]:
    """Step, best evaluation, class names and the like of a checkpoint."""
    try:
        progress: dict[str, Any] = json.loads((path / _PROGRESS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if progress["version"] != VERSION:
        raise CheckpointError(
            f"{path}: has version {progress['version']}, this Trainyard reads {VERSION}; "
            "use the Trainyard that wrote it"
        )
    return progress


def put_weights(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Give a model the weights of the checkpoint at `path`."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()[:200]  # of what may be a line per weight
        raise CheckpointError(f"{path}: its weights do not fit the model: {first}") from None


def find_problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every file is there, unaltered."""
    if not path.is_dir():
        return "no such checkpoint"
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        # There may be no moving average.
        for name in (n for n in _FILES if n != _EMA or n in manifest or (path / n).exists()):
            if sha256(path / name) != manifest[name]:
                return f"{name} is truncated or altered (its SHA-256 differs from the manifest's)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except KeyError as error:
        return f"manifest.json lacks {error}"
    except (OSError, ValueError, TypeError) as error:
        return f"manifest.json is unreadable ({error})"
    return None


def check(path: Path) -> None:
    """CheckpointError unless every file of a checkpoint is there, unaltered."""
    problem = find_problem(path)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}")


def newest_good(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint without a problem; `report` is told of each that is passed over."""
    for path in reversed(_checkpoints(folder)):
        problem = find_problem(path)
        if problem is None:
            return path
        report(f"{path}: {problem}")
    return None


def finite(folder: Path) -> Iterator[Path]:
    """Good checkpoints that were not saved while updates were being skipped, newest first."""
    paths = filter(_is_finite, reversed(_checkpoints(folder)))
    return (path for path in paths if find_problem(path) is None)


def drop_after(folder: Path, path: Path) -> None:
    """Make a checkpoint the latest, and remove those after it."""
    point(folder / "latest", path)
    paths = _checkpoints(folder)
    for later in paths[paths.index(path) + 1 :]:
        shutil.rmtree(_hide(later))


def point_best(folder: Path, state: TrainState) -> None:
    """Make `best` what `state` knows to be the best; a kill may have come between the two."""
    best = folder / f"step-{state.best.get('step', 0):08d}"
    if best.is_dir() and (folder / "best").resolve() != best.resolve():
        point(folder / "best", best)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to a sibling, in one step."""
    part = part_of(link)
    part.symlink_to(target.name)
    os.replace(part, link)


def _write(state: TrainState, folder: Path) -> None:
    folder.mkdir()
    with evaluation_weights(state.optimizer):
        _write_weights(state.model, folder / _MODEL)
    if state.ema is not None:
        _write_weights(state.ema, folder / _EMA)
    training = {
        "optimizer": save_optimizer(state.optimizer),
        "weights": state.model.state_dict() if has_own_weights(state.optimizer) else None,
        "averager": state.averager.state_dict(),
        "scale": state.scale.state_dict(),
    }
    torch.save(training, folder / _TRAINING)
    progress = {
        "version": VERSION,
        "step": state.step,
        "skipped": state.skipped,
        "roll_backs": state.roll_backs,
        "guard": state.guard.state_dict(),
        "clock": state.clock.state_dict(),
        "classes": state.classes,
        "last": state.last,
        "best": state.best,
    }
    (folder / _PROGRESS).write_text(json.dumps(progress, indent=2) + "\n")
    manifest = {name: sha256(folder / name) for name in _FILES if (folder / name).exists()}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    for name in (*manifest, "manifest.json"):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)


def _write_weights(model: nn.Module, path: Path) -> None:
    # Copies on the CPU: safetensors takes neither strided nor shared storage.
    weights = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, path)


def _prune(folder: Path, keep: int) -> None:
    kept = {(folder / name).resolve() for name in ("latest", "best")}
    # Those saved while updates were being skipped are not counted: there may be a way back.
    finite = [path.resolve() for path in _checkpoints(folder) if _is_finite(path)][-keep:]
    best_then = [read_progress(path)["best"].get("step", 0) for path in finite[-1:]]
    kept |= {*finite, *((folder / f"step-{step:08d}").resolve() for step in best_then)}
    for path in _checkpoints(folder):
        if path.resolve() not in kept:
            shutil.rmtree(_hide(path))


def _is_finite(path: Path) -> bool:
    try:
        return not read_progress(path)["guard"]["running"]
    except CheckpointError:
        return False


def _checkpoints(folder: Path) -> list[Path]:
    """Those of a run, oldest first; a copy that someone set aside, step-00000100.bak, is none."""
    paths = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(paths, key=lambda path: int(path.name[5:]))


def _hide(path: Path) -> Path:
    """A doomed checkpoint's new name: there is never half a one under a checkpoint's name."""
    doomed = part_of(path)
    os.replace(path, doomed)
    return doomed


def _remove_leftovers(folder: Path) -> None:
    """What a killed run left half-written."""
    for part in folder.glob(".*.part"):
        if part.is_symlink():
            part.unlink()
        else:
            shutil.rmtree(part, ignore_errors=True)
