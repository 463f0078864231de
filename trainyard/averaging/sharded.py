"""Sharded: all-reduce for models that do not fit; each rank keeps a part (torch's FSDP2)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.world import World

# Modules that use their weights only in operations that autocast computes in half precision.
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Before torch 2.15 a policy has one dtype for all weights of a block.
_HAS_OVERRIDE = "param_dtype_override_fn" in MixedPrecisionPolicy.__dataclass_fields__


class Sharded(AllReduce):
    """Each rank keeps some rows of every parameter, its gradient and its moments.

    A block is whole on a device only while it computes (Rajbhandari et al. 2020, ZeRO stage 3).
    """

    moves_model = True
    waits_in_forward = "average.name = 'sharded'"

    def __init__(
        self,
        config: AverageConfig,
        world: World,
        device: torch.device,
        precision: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, world)
        self._device, self._precision = device, precision
        self._adds_parts = config.accumulate == "parts"
        self._modules: list[Any] = []  # FSDPModules: the model and its moving averages

    @classmethod
    def build(
        cls,
        config: AverageConfig,
        world: World,
        device: torch.device,
        precision: torch.dtype | None,
    ) -> Self:
        return cls(config, world, device, precision)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device block by block, where it is never whole; returns it."""
        self.register_emas({"": model})
        self._statistics.add(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        return model

    def register_emas(self, emas: Mapping[str, nn.Module]) -> None:
        for module in emas.values():
            _shard(module, self._device, self._precision)
            self._modules.append(module)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Unless parts are added: gradients of micro-steps add up whole, in float32."""
        model = self._modules[0]
        model.set_requires_gradient_sync(self._adds_parts)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()  # parameters outside of blocks are whole after a forward pass


def gathered(tensor: Tensor) -> Tensor:
    """A tensor, gathered if each rank has a part of it; then every rank must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(value: Any, like: object) -> Any:
    """This rank's part of a whole tensor if `like` is a part, and of its shape; else the value."""
    if not isinstance(value, Tensor) or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    mesh, rows = like.device_mesh, like.placements
    part = distribute_tensor(value.contiguous(), mesh, rows, src_data_rank=None)
    return part.clone()  # a view would keep the whole


def _shard(model: nn.Module, device: torch.device, precision: torch.dtype | None) -> None:
    model.to(memory_format=torch.contiguous_format)  # all that FSDP takes
    everyone = dist.group.WORLD
    assert everyone is not None
    mesh = DeviceMesh.from_group(everyone, device.type)  # FSDP's default looks for any GPU
    for block in [*reversed(blocks(model)), model]:  # inner ones first
        fully_shard(block, mesh=mesh, mp_policy=_policy(block, precision))


def _policy(block: nn.Module, precision: torch.dtype | None) -> MixedPrecisionPolicy:
    """Gathers in half precision the weights that autocast would cast: half the bytes, no casts.

    Autocast still decides what is computed in which precision, so the result is that of
    all-reduce. Gradients are summed in float32: a sum over many ranks or micro-batches in bf16,
    which has 8 bits, would lose the small ones.
    """
    if precision is None or not _HAS_OVERRIDE:
        return MixedPrecisionPolicy()
    modules = [module for module in block.modules() if type(module) in _CAST]
    cast = {id(p) for module in modules for p in module.parameters(recurse=False)}
    return MixedPrecisionPolicy(
        param_dtype=precision,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda p: precision if id(p) in cast else p.dtype,
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: members of containers whose weighted members are alike."""
    members: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            weighted = [child for child in module if next(child.parameters(), None) is not None]
            kinds = {type(child) for child in weighted}
            if len(kinds) == 1 and not kinds & {nn.ModuleList, nn.ModuleDict}:  # they compute
                members |= dict.fromkeys(weighted)
    return list(members)
