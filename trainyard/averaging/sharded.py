"""Sharded: all-reduce for models that do not fit; each rank keeps a part (torch's FSDP2)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from trainyard.averaging.allreduce import mean_weight
from trainyard.averaging.base import Replica
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.statistics import BatchNormStatistics
from trainyard.world import World


class Sharded:
    """Each rank keeps some rows of every parameter, its gradient and its moments.

    A block is whole on a device only while it computes (Rajbhandari et al. 2020, ZeRO stage 3).
    """

    replica = Replica()

    def __init__(self, config: AverageConfig, world: World, device: torch.device) -> None:
        self._world, self._device = world, device
        self._modules: list[nn.Module] = []  # the model and its moving average
        self._statistics = BatchNormStatistics(world)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device block by block, where it is never whole; returns it."""
        self._add(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        return model

    def register_ema(self, module: nn.Module) -> None:
        self._add(module)

    def _add(self, module: nn.Module) -> None:
        self._modules.append(module)
        self._statistics.add(module)
        _shard(module, self._device)

    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight of the global batch over the number of ranks: FSDP takes their mean."""
        self._statistics.add_weight(weight)
        return mean_weight(weight, self._world.size)

    def accumulating(self) -> AbstractContextManager[None]:
        """Every micro-step averages gradients: unaveraged ones would be whole on each device."""
        return nullcontext()

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        yield self._parameters

    @contextmanager
    def consensus(self) -> Iterator[None]:
        self._statistics.average()
        try:
            yield
        finally:
            for module in self._modules:
                assert isinstance(module, FSDPModule)
                module.reshard()  # parameters outside of blocks are whole after a forward pass

    def all_reduce_max(self, value: Tensor) -> Tensor:
        return value

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._statistics.reset_weight()


def _shard(model: nn.Module, device: torch.device) -> None:
    model.to(memory_format=torch.contiguous_format)  # all that FSDP takes
    everyone = dist.group.WORLD
    assert everyone is not None
    mesh = DeviceMesh.from_group(everyone, device.type)  # FSDP's default looks for any GPU
    for block in reversed(blocks(model)):  # inner ones first
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: members of containers whose weighted members are alike."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            weighted = [child for child in module if next(child.parameters(), None) is not None]
            kinds = {type(child) for child in weighted}
            if len(kinds) == 1 and not kinds & {
                nn.ModuleList,
                nn.ModuleDict,
            }:  # only modules that compute
                found |= dict.fromkeys(weighted)
    return list(found)
