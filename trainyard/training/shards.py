"""Checkpoints of sharded weights and moments.

sharded/            in a checkpoint, by torch.distributed.checkpoint; loads on any number of ranks
    .metadata       location of each tensor
    __0_0.distcp …  parts of each rank: parameters, moving average, the optimizer's moments
"""

import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainyard.errors import CheckpointError
from trainyard.files import disk_error
from trainyard.training.sharding import SHARDS
from trainyard.world import World

_MODEL, _OPTIMIZER = "model.", "optimizer."
_UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    pickle.UnpicklingError,
    CheckpointException,
)
# The classes in metadata of tensors; pickle would call any class that a file names.
_KNOWN = {
    "pathlib": ("PosixPath",),
    "torch": ("Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "bool"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


def sharded_tensors(
    model: nn.Module, emas: Mapping[str, nn.Module], optimizer: Optimizer
) -> dict[str, Tensor]:
    """Host copies of this rank's parts: parameters, moving averages, moments."""
    tensors = _weights(model, emas)
    state = optimizer.state_dict()["state"]
    for number, name in _numbered(model, optimizer):
        for key, value in state.get(number, {}).items():
            if isinstance(value, DTensor):
                tensors[f"{_OPTIMIZER}{name}.{key}"] = value
    return dict(BlockingAsyncStager().stage(tensors))


def write_shards(folder: Path, tensors: dict[str, Tensor], world: World) -> list[str]:
    """Write sharded/ of a new checkpoint, with all ranks. Returns the files of this rank."""
    # No copies ahead: the tensors are on the host, and copies would go through the first GPU.
    writer = _Writer(folder / SHARDS, per_thread_copy_ahead=0)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=world.group)
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        if isinstance(reason, OSError):
            raise reason from None
        raise CheckpointError(f"{folder}: rank {rank}: {reason}") from None
    rank = world.rank
    names = [path.name for path in (folder / SHARDS).glob(f"__{rank}_*")]
    return [f"{SHARDS}/{name}" for name in [*names, *([".metadata"] if rank == 0 else [])]]


def _weights(model: nn.Module, emas: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    tensors = {_MODEL + name: tensor for name, tensor in model.state_dict().items()}
    for kind, ema in emas.items():
        tensors |= {f"{kind}.{name}": tensor for name, tensor in ema.state_dict().items()}
    return tensors


class _Writer(dcp.FileSystemWriter):
    """Raises an OSError for a full disk, on all ranks; torch's own error hides it."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            full = disk_error(error, Path(self.path))
            if full is None:
                raise
            raise OSError(full.errno, full.strerror) from None


# --- reading ---


def read_shards(
    path: Path, model: nn.Module, emas: Mapping[str, nn.Module], optimizer: Optimizer
) -> dict[int, dict[str, Tensor]]:
    """Load the weights of a checkpoint into modules, sharded or not. Returns the moments.

    Moments are keyed by parameter number, as in an optimizer's state, and sharded like the
    parameter. Each rank reads its own parts, without communication.
    """
    reader = _Reader(path / SHARDS)
    try:
        saved = reader.read_metadata().state_dict_metadata
        tensors = _weights(model, emas)
        _check_fit(path, saved, tensors, kinds=(_MODEL, *(f"{kind}." for kind in emas)))
        moments = _empty_moments(saved, model, optimizer)
        for number, name in _numbered(model, optimizer):
            own = moments.get(number, {})
            tensors |= {f"{_OPTIMIZER}{name}.{key}": value for key, value in own.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except _UNREADABLE as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        raise CheckpointError(f"{path}: {SHARDS}/ cannot be read: {reason}") from None
    return moments


def _check_fit(
    path: Path, saved: dict[str, Any], tensors: dict[str, Tensor], *, kinds: tuple[str, ...]
) -> None:
    names = {name for name in saved if name.startswith(kinds)}
    for name in sorted(names ^ tensors.keys()):
        where = "only in the model" if name in tensors else "not in the model"
        raise CheckpointError(f"{path}: its weights do not fit the model: {name} is {where}")
    for name, tensor in tensors.items():
        if saved[name].size != tensor.shape:
            raise CheckpointError(
                f"{path}: its weights do not fit the model: {name} is {list(saved[name].size)}, "
                f"in the model {list(tensor.shape)}"
            )


def _numbered(model: nn.Module, optimizer: Optimizer) -> Iterable[tuple[int, str]]:
    """Each parameter's number in the optimizer's state, and its name."""
    named = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [(number, named[parameter]) for number, parameter in enumerate(parameters)]


def _empty_moments(
    saved: dict[str, Any], model: nn.Module, optimizer: Optimizer
) -> dict[int, dict[str, Tensor]]:
    numbers = {name: number for number, name in _numbered(model, optimizer)}
    parameters = dict(model.named_parameters())
    moments: dict[int, dict[str, Tensor]] = {}
    for entry in saved:
        name, _, key = entry.removeprefix(_OPTIMIZER).rpartition(".")
        if entry.startswith(_OPTIMIZER) and name in numbers:
            moments.setdefault(numbers[name], {})[key] = torch.empty_like(parameters[name])
    return moments


class _Reader(dcp.FileSystemReader):
    """Reads metadata of tensors and unpickles nothing else, since files may be untrusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: Any = _Unpickler(file).load()
        entries = getattr(metadata, "state_dict_metadata", None)
        is_plain = isinstance(entries, dict) and all(
            isinstance(entry, TensorStorageMetadata) for entry in entries.values()
        )
        if not isinstance(metadata, Metadata) or not is_plain:
            raise pickle.UnpicklingError(".metadata describes no tensors")
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which is not needed")
        return super().find_class(module, name)
