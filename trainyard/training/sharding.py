"""Weights and moments of which each rank keeps a part (FSDP2's DTensors)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SHARDS = "sharded"
"""Folder of a checkpoint with the sharded tensors; see shards.py."""


def is_sharded(model: nn.Module) -> bool:
    """True if each rank keeps a part of the model; all ranks must then take part in using it."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered if it is sharded; then every rank must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    """This rank's part of a whole tensor, sharded like `like`; all of it if `like` is whole."""
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
    """Copies of a module's weights; empty on ranks that do not `keep` them.

    Sharded weights are gathered one by one, so that no device holds all of them; every rank calls.
    """
    weights = {}
    for name, tensor in module.state_dict().items():
        gathered = whole(tensor.detach())
        if keep:
            weights[name] = copy_of(gathered)
    return weights


def without_shards(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state without sharded tensors."""
    state = {
        number: {key: value for key, value in own.items() if not isinstance(value, DTensor)}
        for number, own in optimizer_state["state"].items()
    }
    return optimizer_state | {"state": state}


def has_shards(path: Path) -> bool:
    """True if a checkpoint has sharded tensors."""
    return (path / SHARDS).is_dir()
