"""Contents of a checkpoint, with checksums.

checkpoints/step-00001234/
    model.safetensors   weights to use elsewhere; the mean, if replicas differ
    ema.safetensors     their moving average, if there is one; ema-0.99.safetensors … of several
    training.pt         loss scale; optimizer, averager, and the training weights if they differ
                        from those to use (schedule-free); loaded with weights_only
    replicas/00000.pt   per replica, if replicas differ: optimizer, averager with its own weights;
                        with PowerSGD: the part of its gradients that was left out so far
    sharded/            if each rank keeps a part: training weights, average, moments; see
                        shards.py
    progress.json       version, step, clock, evaluations, skipped samples
    manifest.json       SHA-256 of each file above
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from trainyard.averaging.base import Averager
from trainyard.errors import CheckpointError
from trainyard.files import fsync, read_json, sha256, use_umask, why_unreadable
from trainyard.monitor.clock import Clock
from trainyard.training.guard import Guard
from trainyard.training.host_memory import HostCopies
from trainyard.training.optimizer_state import (
    evaluation_weights,
    has_own_weights,
    put_optimizer,
    save_optimizer,
)
from trainyard.training.sharding import (
    SHARDS,
    has_shards,
    is_sharded,
    part_like,
    whole_weights,
    without_shards,
)
from trainyard.training.update import LossScale
from trainyard.world import World

VERSION = 2
_MODEL, _TRAINING, _PROGRESS, _MANIFEST = (
    "model.safetensors",
    "training.pt",
    "progress.json",
    "manifest.json",
)
_REPLICAS = "replicas"
_STEP_OF = re.compile(r"step-(\d+)")


class _Count(BaseModel):
    running: NonNegativeInt


_Time = Annotated[float, Field(gt=-1e12, lt=1e12)]  # s; a timedelta holds no more


class _Seconds(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, _Time]
    total: _Time


class _Evaluation(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, float | str | None]
    step: NonNegativeInt = 0


class _Stream(BaseModel):
    ranks: int = 0
    ends: list[int] = []
    seen: int = 0


class _Progress(BaseModel):
    """Types of the entries of progress.json."""

    step: NonNegativeInt
    skipped: NonNegativeInt
    roll_backs: NonNegativeInt
    guard: _Count
    clock: _Seconds
    classes: list[str]
    last: _Evaluation
    best: _Evaluation
    has_lists: bool = False
    stream: _Stream = _Stream()
    conditions: dict[str, str] = {}


@dataclass
class TrainState:
    """The saved state of a run. It holds nothing that follows from the recipe."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    averager: Averager
    emas: dict[str, nn.Module]
    """The moving averages by name; see averages.py."""
    scale: LossScale
    guard: Guard
    clock: Clock
    classes: list[str]
    has_lists: bool = False
    """True for a model of images with lists of labels: its outputs are independent."""
    step: int = 0
    skipped: int = 0
    """Samples of the stream that were passed over when the weights rolled back."""
    stream: dict[str, Any] = field(default_factory=dict)
    """Position in data without an index, kept by the feed; see data/device/join.py."""
    roll_backs: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    """The latest evaluation and its step."""
    best_by: str = "top1"
    """The key of an evaluation that decides the best; see run.best_by."""
    best: dict[str, Any] = field(default_factory=dict)
    """The evaluation with the highest value of `best_by` so far and its step."""
    conditions: dict[str, str] = field(default_factory=dict)
    """What else the last bits of a run depend on: see run/resume.py."""


def load_checkpoint(state: TrainState, path: Path) -> str | None:
    """Load a verified checkpoint into `state`. Returns a note on what differs from the save."""
    progress = read_progress(path)
    for name in state.emas:
        if not _file(path, name).exists():
            raise CheckpointError(
                f"{path}: has no {_file(path, name).name}, because its run had another "
                "model.ema_decay, or none"
            )
    try:
        note = _load_training(state, path)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {_TRAINING} is not as Trainyard writes it ({error!r})"
        ) from None
    state.guard.load_state_dict(progress["guard"])
    state.clock.load_state_dict(progress["clock"])
    state.step, state.skipped = progress["step"], progress["skipped"]
    state.stream.clear()
    state.stream.update(progress.get("stream", {}))  # in place: the feed shares it
    state.roll_backs = progress["roll_backs"]
    state.last, state.best = progress["last"], progress["best"]
    return note


def _load_training(state: TrainState, path: Path) -> str | None:
    training = _load(path / _TRAINING)
    if has_shards(path):
        from trainyard.training.shards import read_shards

        moments = read_shards(path, state.model, state.emas, state.optimizer)
        for number, own in training["optimizer"]["state"].items():
            own |= moments.get(number, {})
    else:
        _put_all_weights(state, path, training)
    return _load_replica(state, path, training)


def _put_all_weights(state: TrainState, path: Path, training: dict[str, Any]) -> None:
    put_weights(state.model, load_weights(path), path)
    for name, module in state.emas.items():
        put_weights(module, load_weights(path, name), path)
    if training["weights"] is not None:
        put_weights(state.model, training["weights"], path)


def _load_replica(state: TrainState, path: Path, training: dict[str, Any]) -> str | None:
    """Load each replica's own part. It is exact if as many replicas resume as were saved."""
    replica = state.averager.replica
    saved = sorted((path / _REPLICAS).glob("*.pt"))
    own = training | (_load(saved[replica.number % len(saved)]) if saved else {})
    put_optimizer(state.optimizer, own["optimizer"], path)
    state.scale.load_state_dict(own["scale"])
    is_as_saved = max(len(saved), 1) == replica.total
    state.averager.load_state_dict(own["averager"] if is_as_saved else {})
    if is_as_saved or not saved:
        return None
    return (
        f"{len(saved)} replicas were saved and {replica.total} go on: all from their mean, each "
        "with the moments of one of them"
    )


def averages(path: Path) -> list[str]:
    """Names of the moving averages of the weights in a checkpoint, by rising decay."""
    names = [file.stem for file in path.glob("ema*.safetensors")]
    ours = [name for name in names if re.fullmatch(r"ema(-\d+(\.\d+)?(e-\d+)?)?", name)]
    return sorted(ours, key=lambda name: float(name.partition("-")[2] or 0))


def _file(path: Path, weights: str) -> Path:
    return path / (f"{weights}.safetensors" if weights else _MODEL)


def load_weights(path: Path, weights: str = "") -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, or a moving average, by its name."""
    try:
        return load_file(_file(path, weights))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _load(file: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises many kinds of errors
        raise CheckpointError(
            f"{file.parent}: {file.name} cannot be read: {why_unreadable(error)}"
        ) from None
    return loaded


def read_progress(path: Path) -> dict[str, Any]:
    """The content of progress.json: step, best evaluation, class names and so on."""
    try:
        return _progress(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _progress(path: Path) -> dict[str, Any]:
    """Like `read_progress`; ValueError for a content that is not Trainyard's."""
    try:
        progress = read_json(path / _PROGRESS)
        if progress.get("version") == VERSION:
            _Progress.model_validate(progress, strict=True)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(f"{_PROGRESS} has no {key!r}, or not of its kind") from None
    except ValueError as error:
        raise ValueError(f"{_PROGRESS} cannot be read: {error}") from None
    if progress.get("version") != VERSION:
        raise ValueError(
            f"has version {progress.get('version')}, this version of Trainyard reads {VERSION}; "
            "use the Trainyard that wrote it"
        )
    named = _STEP_OF.fullmatch(path.name)  # a copy set aside may have any other name
    if named and int(named[1]) != progress["step"]:
        raise ValueError(f"is of step {progress['step']:,}: rename the folder back")
    return progress


def put_weights(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Load the weights of the checkpoint at `path` into a model."""
    own = model.state_dict()
    parts = {name: part_like(tensor, own.get(name)) for name, tensor in weights.items()}
    try:
        model.load_state_dict(parts)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()[:200]  # the message may have a line per weight
        raise CheckpointError(f"{path}: its weights do not fit the model: {first}") from None


def find_problem(path: Path) -> str | None:
    """A checkpoint's problem, or None if every file is there, unaltered."""
    if not path.is_dir():
        return "is not a folder" if os.path.lexists(path) else "no such checkpoint"
    try:
        manifest = read_json(path / _MANIFEST)
        there = {_MODEL, _TRAINING, _PROGRESS, *(_file(path, n).name for n in averages(path))}
        for name in sorted(there | manifest.keys()):
            if sha256(path / name) != manifest[name]:
                return f"{name} is truncated or altered (its SHA-256 differs from the manifest's)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except KeyError as error:
        return f"manifest.json lacks {error}"
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}"
    except ValueError as error:
        return f"manifest.json is unreadable ({error})"
    try:
        _progress(path)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def check(path: Path) -> None:
    """CheckpointError unless every file of a checkpoint is there, unaltered."""
    problem = find_problem(path)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}")


Manifest = dict[str, str]
"""SHA-256 of each file by its path in the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A rank's copy of its part of a checkpoint, as of one step: later steps do not change it."""

    step: int
    best_step: int
    """The step of the best evaluation; 0 if there was none."""
    num_bytes: int
    """Bytes of weights, moving average and moments on all ranks: nearly all of the checkpoint."""
    common: "Common | None"
    """The part that all ranks share, on the first rank, which writes it; None on others."""
    replica: tuple[str, dict[str, Any]] | None
    """This replica's file and content, if replicas differ."""
    shards: dict[str, torch.Tensor] | None
    """This rank's parts of sharded tensors, by name."""


class Common(NamedTuple):
    """The part of a checkpoint that the first rank writes for all."""

    weights: dict[str, torch.Tensor]
    emas: dict[str, dict[str, torch.Tensor]]
    training: dict[str, Any]
    progress: str


def snapshot(state: TrainState, world: World, copies: HostCopies | None = None) -> Snapshot:
    """Copy this rank's part of a checkpoint; call it inside the averager's consensus.

    Every rank calls it, as sharded weights are gathered. The copies lie in the memory of `copies`,
    if given, and overwrite its previous copies.
    """
    copies = HostCopies() if copies is None else copies
    copies.begin()
    with evaluation_weights(state.optimizer):
        weights = whole_weights(state.model, copies, keep=world.is_first)
    emas = {
        name: whole_weights(module, copies, keep=world.is_first)
        for name, module in state.emas.items()
    }
    shards = None
    if is_sharded(state.model):
        from trainyard.training.shards import sharded_tensors

        shards = sharded_tensors(state.model, state.emas, state.optimizer)
    taken = Snapshot(
        step=state.step,
        best_step=state.best.get("step", 0),
        num_bytes=_num_bytes(state),
        common=_common(state, weights, emas, copies) if world.is_first else None,
        replica=_replica(state, copies) if shards is None else None,
        shards=shards,
    )
    copies.settle()
    return taken


def _common(
    state: TrainState,
    weights: dict[str, torch.Tensor],
    emas: dict[str, dict[str, torch.Tensor]],
    copies: HostCopies,
) -> Common:
    is_apart = has_own_weights(state.optimizer) and not is_sharded(state.model)
    training = {
        "weights": state.model.state_dict() if is_apart else None,
        **({} if state.averager.replica.differs else _own(state)),
    }
    progress = {
        "version": VERSION,
        "step": state.step,
        "skipped": state.skipped,
        "stream": state.stream,
        "roll_backs": state.roll_backs,
        "guard": state.guard.state_dict(),
        "clock": state.clock.state_dict(),
        "classes": state.classes,
        "has_lists": state.has_lists,
        "last": state.last,
        "best": state.best,
        "best_by": state.best_by,
        "conditions": state.conditions,
    }
    return Common(weights, emas, copies(training), json.dumps(progress, indent=2) + "\n")


def _replica(state: TrainState, copies: HostCopies) -> tuple[str, dict[str, Any]] | None:
    replica = state.averager.replica
    if not replica.differs:
        return None
    return f"{_REPLICAS}/{replica.number:05d}.pt", copies(_own(state))


def _own(state: TrainState) -> dict[str, Any]:
    """The state that each replica saves, where they differ."""
    return {
        "optimizer": without_shards(save_optimizer(state.optimizer)),
        "averager": state.averager.state_dict(),
        "scale": state.scale.state_dict(),
    }


def _num_bytes(state: TrainState) -> int:
    modules = [state.model, *state.emas.values()]
    weights = [tensor for module in modules for tensor in module.state_dict().values()]
    moments = [m for own in state.optimizer.state.values() for m in own.values()]
    is_twice = is_sharded(state.model) or has_own_weights(state.optimizer)  # training weights too
    replica = state.averager.replica
    copies = replica.total if replica.differs else 1
    return (1 + is_twice) * sum(map(_bytes_of, weights)) + copies * sum(map(_bytes_of, moments))


def _bytes_of(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def write_tensors(content: Any, path: Path) -> None:
    """torch.save to a file opened here: torch's own error hides why a file cannot be written."""
    with open(path, "wb") as file:
        torch.save(content, file)


def write_common(common: Common, folder: Path) -> Manifest:
    """Write the first rank's part into the folder of a new checkpoint."""
    weights = {
        _file(folder, name): own for name, own in {"": common.weights, **common.emas}.items()
    }
    for path, tensors in weights.items():
        save_file(_contiguous(tensors), path)
        use_umask(path)
    write_tensors(common.training, folder / _TRAINING)
    (folder / _PROGRESS).write_text(common.progress)
    return _down_to_the_disk(folder, [*(path.name for path in weights), _TRAINING, _PROGRESS])


def write_own(taken: Snapshot, folder: Path, world: World) -> Manifest:
    """Write the part that is this rank's alone; every rank calls it."""
    if taken.shards is not None:
        from trainyard.training.shards import write_shards

        return _down_to_the_disk(folder, write_shards(folder, taken.shards, world))
    if taken.replica is None:
        return {}
    name, content = taken.replica
    (folder / _REPLICAS).mkdir(exist_ok=True)
    write_tensors(content, folder / name)
    return _down_to_the_disk(folder, [name])


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors, as safetensors requires."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Complete the checkpoint in `folder` with its manifest, and sync it to disk."""
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    _down_to_the_disk(folder, [_MANIFEST])
    for inner in (folder / _REPLICAS, folder / SHARDS, folder):
        if inner.exists():
            fsync(inner)


def _down_to_the_disk(folder: Path, names: list[str]) -> Manifest:
    manifest = {name: sha256(folder / name) for name in names}
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    return manifest
