"""Sharded: all-reduce for models that do not fit, each rank keeping a part (torch's FSDP2)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from trainyard.averaging.allreduce import mean_weight
from trainyard.averaging.base import AverageConfig, Replica
from trainyard.averaging.statistics import Statistics
from trainyard.world import World


class Sharded:
    """Each rank keeps, of every parameter, its gradient and its moments, a share of the rows.

    A block is whole on a device for as long as it computes (Rajbhandari et al. 2020, ZeRO stage 3).
    """

    replica = Replica()

    def __init__(self, config: AverageConfig, world: World, device: torch.device) -> None:
        self._world, self._device = world, device
        self._modules: list[nn.Module] = []  # the model, and what follows it
        self._statistics = Statistics(world)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself, put on the device block by block: it was never whole there."""
        self.follow(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        return model

    def follow(self, module: nn.Module) -> None:
        self._modules.append(module)
        self._statistics.add(module)
        _shard(module, self._device)

    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight of the global batch over the number of ranks, whose mean FSDP takes."""
        self._statistics.see(weight)
        return mean_weight(weight, self._world.size)

    def accumulating(self) -> AbstractContextManager[None]:
        """Gradients are averaged in every micro-step: those that wait for it would be whole."""
        return nullcontext()

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        yield self._parameters

    @contextmanager
    def consensus(self) -> Iterator[None]:
        self._statistics.put_mean()
        try:
            yield
        finally:
            for module in self._modules:
                assert isinstance(module, FSDPModule)
                module.reshard()  # what belongs to no block is whole after a forward pass

    def highest(self, value: Tensor) -> Tensor:
        return value

    def figures(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._statistics.forget()


def _shard(model: nn.Module, device: torch.device) -> None:
    model.to(memory_format=torch.contiguous_format)  # FSDP takes no other
    everyone = dist.group.WORLD
    assert everyone is not None
    mesh = DeviceMesh.from_group(everyone, device.type)  # by itself FSDP looks for any GPU
    for block in reversed(blocks(model)):  # inner ones first
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> list[nn.Module]:
    """What a model repeats: the members of containers in which all that have weights are alike."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            weighty = [child for child in module if next(child.parameters(), None) is not None]
            kinds = {type(child) for child in weighty}
            if len(kinds) == 1 and not kinds & {nn.ModuleList, nn.ModuleDict}:  # which compute
                found |= dict.fromkeys(weighty)
    return list(found)
