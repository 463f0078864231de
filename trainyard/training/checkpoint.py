"""Contents of a checkpoint, with checksums.

checkpoints/step-00001234/
    model.safetensors   weights to use elsewhere; the mean, if replicas differ
    ema.safetensors     their moving average, if there is one; ema-0.99.safetensors … of several
    training.pt         loss scale; optimizer, averager, and the training weights if they differ
                        from those to use (schedule-free); loaded with weights_only
    replicas/00000.pt   per replica, if replicas differ: optimizer, averager with its own weights
    progress.json       version, step, clock, evaluations, skipped samples
    manifest.json       SHA-256 of each file above
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from trainyard.averaging.base import Averager
from trainyard.averaging.sharded import part_like
from trainyard.errors import CheckpointError
from trainyard.files import fsync, read_json, sha256, use_umask, why_unreadable
from trainyard.monitor.clock import Clock
from trainyard.training.guard import Guard
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
# Entries of a parameter group that are state, in timm's LAMB and in schedule-free optimizers.
_COUNTS = frozenset(("step", "k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"))


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
    stale: NonNegativeInt = 0
    has_lists: bool = False
    stream: _Stream = _Stream()
    conditions: dict[str, str] = {}


@dataclass
class TrainState:
    """The saved state of a run. It holds nothing that follows from the recipe."""

    model: nn.Module
    optimizer: Optimizer
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
    """The best evaluation by `best_by` so far, with its step; of equal ones the last."""
    stale: int = 0
    """Number of evaluations since one was better than all before it."""
    conditions: dict[str, str] = field(default_factory=dict)
    """What else the last bits of a run depend on: see run/resume.py."""


def has_own_weights(optimizer: Optimizer) -> bool:
    """True if training and evaluation weights differ (schedule-free, Defazio et al. 2024)."""
    return hasattr(optimizer, "eval") and hasattr(optimizer, "train")


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the model has the weights for evaluation and export; then its own again, bit by bit.

    No effect for optimizers without separate weights.
    """
    if not has_own_weights(optimizer):
        yield
        return
    modes: Any = optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    in_training = [parameter.detach().clone() for parameter in parameters]
    modes.eval()
    try:
        yield
    finally:
        modes.train()  # computes the weights back, up to rounding
        with torch.no_grad():
            for parameter, weight in zip(parameters, in_training, strict=True):
                parameter.copy_(weight)


# --- loading ---


def load_checkpoint(state: TrainState, path: Path) -> str | None:
    """Load a verified checkpoint into `state`. Returns a note on what differs from the save."""
    progress = read_progress(path)
    if (path / "sharded").exists():
        raise CheckpointError(
            "checkpoint.sharded",
            "{path}: its state is in parts (sharded/), as an older Trainyard wrote it: go on with "
            "that one, or start another run from its weights, --model.checkpoint {path}",
            path=path,
        )
    if reason := _other_classes(progress, state):
        raise CheckpointError(
            "checkpoint.other-classes",
            "{path}: is of other classes than the data: {reason}; start from its weights, "
            "--model.checkpoint {path}, which sorts the classifier by name or leaves it out",
            path=path,
            reason=reason,
        )
    for name in map(_name_of, state.emas):
        if not (path / name).exists():
            raise CheckpointError(
                "checkpoint.average-missing",
                "{path}: has no {name}, because its run had another model.ema_decay, or none",
                path=path,
                name=name,
            )
    try:
        note = _load_training(state, path)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "checkpoint.malformed-state",
            "{path}: {name} is not as Trainyard writes it ({reason})",
            path=path,
            name=_TRAINING,
            reason=repr(error),
        ) from None
    state.guard.load_state_dict(progress["guard"])
    state.clock.load_state_dict(progress["clock"])
    state.step, state.skipped = progress["step"], progress["skipped"]
    state.stream.clear()
    state.stream.update(progress.get("stream", {}))  # in place: the feed shares it
    state.roll_backs = progress["roll_backs"]
    state.last, state.best = progress["last"], progress["best"]
    state.stale = progress.get("stale", 0)  # 0.2.0 did not count
    return note


def _other_classes(progress: Mapping[str, Any], state: TrainState) -> str:
    """How the classes of a checkpoint differ from a run's; empty if they do not."""
    if progress.get("has_lists", False) != state.has_lists:
        return "one of the two has lists of labels"
    theirs, ours = progress["classes"], state.classes
    alone = {"of its own": sorted({*theirs} - {*ours}), "new": sorted({*ours} - {*theirs})}
    texts = [f"{len(n):,} {which}, such as {n[0]!r}" for which, n in alone.items() if n]
    return "" if theirs == ours else " and ".join(texts) or "the same in another order"


def _load_training(state: TrainState, path: Path) -> str | None:
    """Load all weights, and each replica's own part: exact if as many resume as were saved."""
    training = _load(path / _TRAINING)
    put_weights(state.model, load_weights(path), path)
    for name, module in state.emas.items():
        put_weights(module, load_weights(path, name), path)
    if training["weights"] is not None:
        put_weights(state.model, training["weights"], path)
    replica = state.averager.replica
    saved = sorted((path / _REPLICAS).glob("*.pt"))
    saved_state = training | (_load(saved[replica.number % len(saved)]) if saved else {})
    put_optimizer(state.optimizer, state.model, saved_state["optimizer"], path)
    state.scale.load_state_dict(saved_state["scale"])
    is_as_saved = max(len(saved), 1) == replica.total
    if isinstance(modules := saved_state["averager"].get("own"), list):  # 0.2.0: by rising decay
        saved_state["averager"]["own"] = dict(zip(("", *averages(path)), modules, strict=True))
    state.averager.load_state_dict(saved_state["averager"] if is_as_saved else {})
    if is_as_saved or not saved:
        return None
    return (
        f"{len(saved)} replicas were saved and {replica.total} go on: all from their mean, each "
        "with the moments of one of them"
    )


def put_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Load the weights of the checkpoint at `path` into a model."""
    current = model.state_dict()
    parts = {name: part_like(tensor, current.get(name)) for name, tensor in weights.items()}
    try:
        model.load_state_dict(parts)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()[:200]  # the message may have a line per weight
        raise CheckpointError(
            "checkpoint.weights-do-not-fit",
            "{path}: its weights do not fit the model: {reason}",
            path=path,
            reason=first,
        ) from None


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """The kind of an optimizer, and its state by names of parameters, for `put_optimizer`."""
    state = _by_name(optimizer.state_dict(), [*_parameters(optimizer, model)])
    return {"kind": type(optimizer).__name__, **state}


def _parameters(optimizer: Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an optimizer by name, in the order of its groups."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: p for group in optimizer.param_groups for p in group["params"]}


def _by_name(state: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The state of an optimizer with names for torch's numbers, which count through its groups."""
    groups = state["param_groups"]
    return {
        "state": {names[number]: moments for number, moments in state["state"].items()},
        "param_groups": [g | {"params": [names[number] for number in g["params"]]} for g in groups],
    }


def put_optimizer(
    optimizer: Optimizer, model: nn.Module, saved: dict[str, Any], path: Path
) -> None:
    """Load moments and counts from the checkpoint at `path`; rates and such stay the recipe's.

    Each parameter gets its own. CheckpointError for another optimizer or other parameters.
    """
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise CheckpointError(
            "checkpoint.other-optimizer",
            "{path}: is of {found}, the recipe says {wanted}",
            path=path,
            found=saved["kind"],
            wanted=kind,
        )
    parameters = _parameters(optimizer, model)
    current = _by_name(optimizer.state_dict(), [*parameters])
    if isinstance(saved["param_groups"][0]["params"][0], int):  # until 0.2.0 without names
        sizes, wanted = ([len(g["params"]) for g in of["param_groups"]] for of in (saved, current))
        if "names" not in saved and sizes != wanted:
            raise _does_not_fit(path, "its groups of parameters have other sizes")
        saved = _by_name(saved, saved.get("names", [*parameters]))
    group_of = {name: group for group in saved["param_groups"] for name in group["params"]}
    for name in sorted(group_of.keys() ^ parameters.keys()):
        reason = "the recipe does not train" if name in group_of else "its run did not train"
        raise _does_not_fit(path, f"{reason} {name}")
    _check_shapes(saved["state"], parameters, path)
    for group in current["param_groups"]:
        group |= _counts(group, [group_of[name] for name in group["params"]], path)
    current["state"] = {
        name: {key: _moment(value, parameters[name]) for key, value in moments.items()}
        for name, moments in saved["state"].items()
    }
    optimizer.load_state_dict(current)


def _check_shapes(
    state: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter], path: Path
) -> None:
    """CheckpointError for a moment of another shape: a fused kernel would write past its end."""
    entries = [(key, value) for of in state.values() for key, value in of.items()]
    scalars = {key for key, _ in entries} - {k for k, v in entries if getattr(v, "ndim", 0)}
    for name, moments in state.items():
        for key, value in moments.items():
            if key not in scalars and not _fits(key, value.shape, parameters[name].shape):
                shape = " x ".join(map(str, value.shape))
                raise _does_not_fit(path, f"its {key} of {name} has the shape {shape}")


def _fits(key: str, shape: torch.Size, full: torch.Size) -> bool:
    if not key.startswith("exp_avg_sq_"):
        return shape == full
    # Adafactor's means over rows or columns, whose dimension is 1 or is not there.
    has_ones = len(shape) == len(full) and all(
        number in (1, other) for number, other in zip(shape, full, strict=True)
    )
    return has_ones or shape in (full[:-1], full[:-2] + full[-1:])


def _counts(group: dict[str, Any], origins: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The counts of a group: those of the saved groups that its parameters come from."""
    counts, *others = (
        {key: value for key, value in of.items() if key in _COUNTS or key not in group}
        for of in origins
    )
    if any(other != counts for other in others):
        raise _does_not_fit(path, "parameters of one group come from groups of other counts")
    return counts


def _does_not_fit(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "checkpoint.optimizer-does-not-fit",
        "{path}: its optimizer does not fit the recipe: {reason}; start from its weights, "
        "--model.checkpoint {path}",
        path=path,
        reason=reason,
    )


def _moment(value: Any, parameter: nn.Parameter) -> Any:
    """This rank's part of a moment, laid out as its parameter: fused kernels rely on that."""
    part = part_like(value, parameter)
    if type(part) is not Tensor or part.shape != parameter.shape:
        return part
    return torch.empty_like(parameter, dtype=part.dtype, device=part.device).copy_(part)


def load_weights(path: Path, weights: str = "") -> dict[str, Tensor]:
    """The weights of a checkpoint, or a moving average, by its name."""
    name = _name_of(weights)
    try:
        return load_file(path / name)
    except (OSError, SafetensorError) as error:
        reason = str(error)
        raise CheckpointError(
            "checkpoint.file-unreadable", path=path, name=name, reason=reason
        ) from None


def _load(file: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises many kinds of errors
        raise CheckpointError(
            "checkpoint.file-unreadable",
            path=file.parent,
            name=file.name,
            reason=why_unreadable(error),
        ) from None
    return loaded


# --- checking ---


def averages(path: Path) -> list[str]:
    """Names of the moving averages of the weights in a checkpoint, by rising decay."""
    names = [file.stem for file in path.glob("ema*.safetensors")]
    ours = [name for name in names if re.fullmatch(r"ema(-\d+(\.\d+)?(e-\d+)?)?", name)]
    return sorted(ours, key=lambda name: float(name.partition("-")[2] or 0))


def _name_of(weights: str) -> str:
    return f"{weights}.safetensors" if weights else _MODEL


def read_progress(path: Path) -> dict[str, Any]:
    """The content of progress.json: step, best evaluation, class names and so on.

    CheckpointError for a content that is not Trainyard's.
    """
    try:
        progress = read_json(path / _PROGRESS)
        if progress.get("version") == VERSION:
            _Progress.model_validate(progress, strict=True)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise CheckpointError(
            "checkpoint.progress-incomplete",
            "{path}: {name} has no {entry!r}, or not of its kind",
            path=path,
            name=_PROGRESS,
            entry=key,
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, _PROGRESS, error) from None
    if (version := progress.get("version")) != VERSION:
        raise CheckpointError(
            "checkpoint.other-version",
            "{path}: has version {version}, this version of Trainyard reads {known}; use the "
            "Trainyard that wrote it",
            path=path,
            version=version,
            known=VERSION,
        )
    named = _STEP_OF.fullmatch(path.name)  # a copy set aside may have any other name
    if named and int(named[1]) != progress["step"]:
        raise CheckpointError(
            "checkpoint.renamed",
            "{path}: is of step {step:,}: rename the folder back",
            path=path,
            step=progress["step"],
        )
    return progress


def _unreadable(path: Path, name: str, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(
            "checkpoint.file-missing", "{path}: {name} is missing", path=path, name=name
        )
    reason = getattr(error, "strerror", None) or str(error)
    return CheckpointError("checkpoint.file-unreadable", path=path, name=name, reason=reason)


def find_problem(path: Path) -> CheckpointError | None:
    """A checkpoint's problem, or None if every file is there, unaltered."""
    try:
        check(path)
    except CheckpointError as error:
        return error
    return None


def check(path: Path) -> None:
    """CheckpointError unless every file of a checkpoint is there, unaltered."""
    if not path.is_dir():
        if os.path.lexists(path):
            raise CheckpointError("checkpoint.not-a-folder", "{path}: is not a folder", path=path)
        raise CheckpointError("checkpoint.not-found", "{path}: no such checkpoint", path=path)
    try:
        manifest = read_json(path / _MANIFEST)
    except (OSError, ValueError) as error:
        raise _unreadable(path, _MANIFEST, error) from None
    required = {_MODEL, _TRAINING, _PROGRESS, *map(_name_of, averages(path))}
    for name in sorted(required | manifest.keys()):
        try:
            checksum = sha256(path / name)
        except (OSError, ValueError) as error:
            raise _unreadable(path, name, error) from None
        if name not in manifest:
            raise CheckpointError(
                "checkpoint.file-not-listed",
                "{path}: manifest.json lacks {name!r}",
                path=path,
                name=name,
            )
        if checksum != manifest[name]:
            raise CheckpointError(
                "checkpoint.file-altered",
                "{path}: {name} is truncated or altered (its SHA-256 differs from the manifest's)",
                path=path,
                name=name,
            )
    read_progress(path)


# --- saving ---

Manifest = dict[str, str]
"""SHA-256 of each file by its path in the checkpoint."""


def contents(state: TrainState, world: World, copy: Callable[..., Any]) -> dict[str, Any]:
    """The content of each file that this rank writes, by its path in the checkpoint.

    `copy` has the signature of saver.HostCopies: every rank calls, as sharded tensors are gathered.
    Call it inside the averager's consensus.
    """
    of_all = _files_of_all(state, partial(copy, keep=world.is_first))
    files, replica = of_all if world.is_first else {}, state.averager.replica
    if replica.differs:
        files[f"{_REPLICAS}/{replica.number:05d}.pt"] = copy(_replica_state(state), keep=True)
    return files


def _files_of_all(state: TrainState, copy: Callable[[Any], Any]) -> dict[str, Any]:
    """The files that all ranks share, which the first one writes."""
    with evaluation_weights(state.optimizer):
        weights = copy(state.model.state_dict())
    training = {
        "weights": state.model.state_dict() if has_own_weights(state.optimizer) else None,
        **({} if state.averager.replica.differs else _replica_state(state)),
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
        "stale": state.stale,
        "conditions": state.conditions,
    }
    return {
        _MODEL: weights,
        **{_name_of(name): copy(module.state_dict()) for name, module in state.emas.items()},
        _TRAINING: copy(training),
        _PROGRESS: _as_json(progress),
    }


def _replica_state(state: TrainState) -> dict[str, Any]:
    """The state that each replica saves, where they differ."""
    return {
        "optimizer": optimizer_state(state.optimizer, state.model),
        "averager": state.averager.state_dict(),
        "scale": state.scale.state_dict(),
    }


def num_bytes(state: TrainState) -> int:
    """Bytes of weights, moving averages and moments of all ranks: nearly all of a checkpoint."""
    modules = [state.model, *state.emas.values()]
    weights = [tensor for module in modules for tensor in module.state_dict().values()]
    moments = [m for moments_of in state.optimizer.state.values() for m in moments_of.values()]
    replica = state.averager.replica
    copies = replica.total if replica.differs else 1
    weights *= 1 + has_own_weights(state.optimizer)  # training weights too
    return sum(tensor.nbytes for tensor in [*weights, *copies * moments] if torch.is_tensor(tensor))


def write_files(files: Mapping[str, Any], folder: Path) -> Manifest:
    """Write a rank's files into the folder of a new checkpoint, down to the disk."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".safetensors":
            save_file({key: tensor.contiguous() for key, tensor in content.items()}, path)
            use_umask(path)
        elif path.suffix == ".pt":
            with open(path, "wb") as file:  # torch's own error hides why it cannot be written
                torch.save(content, file)
        else:
            path.write_text(content)
    manifest = {name: sha256(folder / name) for name in files}
    for name in files:
        fsync(folder / name)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Complete the checkpoint in `folder` with its manifest, and sync it to disk."""
    write_files({_MANIFEST: _as_json(manifest)}, folder)
    for inner in (folder / _REPLICAS, folder):
        if inner.exists():
            fsync(inner)


def _as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
