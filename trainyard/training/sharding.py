"""Weights and moments of which each rank keeps a part (FSDP2's DTensors)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SHARDS = "sharded"
"""The folder of a checkpoint in which they lie; see shards.py."""


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank keeps a part of the model, so that all must take part in using it."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered if it is sharded, for which every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    """What this rank keeps of a whole tensor, as it does of `like`; all of it if that is whole."""
    is_whole = not isinstance(tensor, DTensor)
    if not is_whole or not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    mesh = like.device_mesh
    rows = torch.chunk(tensor, mesh.size())[mesh.get_local_rank() :][:1]
    own = rows[0] if rows else tensor[:0]
    own = own.to(like.device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        own, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def whole_weights(
    module: nn.Module, copy_of: Callable[[Tensor], Tensor] = _to_host, *, keep: bool
) -> dict[str, Tensor]:
    """Copies of a module's weights, for a rank that is to `keep` them.

    Sharded ones are gathered one after another, so that no device holds them all; every rank calls.
    """
    weights = {}
    for name, tensor in module.state_dict().items():
        gathered = whole(tensor.detach())
        if keep:
            weights[name] = copy_of(gathered)
    return weights


def without_shards(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state but for tensors of which each rank has a part."""
    state = {
        number: {key: value for key, value in own.items() if not isinstance(value, DTensor)}
        for number, own in optimizer_state["state"].items()
    }
    return optimizer_state | {"state": state}


def has_shards(path: Path) -> bool:
    """Whether a checkpoint was written by ranks each of which kept a part."""
    return (path / SHARDS).is_dir()
