"""Batch norm statistics: each rank's own, and their mean."""

import torch
from torch import Tensor, nn

from trainyard.averaging.flat import flatten, unflatten_into
from trainyard.world import World, total


def batch_norm_statistics(module: nn.Module) -> list[Tensor]:
    """The saved floating-point buffers; other buffers are constants, which a mean would round."""
    saved = module.state_dict()
    named = module.named_buffers()
    return [buffer for name, buffer in named if name in saved and buffer.is_floating_point()]


class BatchNormStatistics:
    """Averages the batch norm statistics of modules that every rank has."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._modules: list[nn.Module] = []
        self._weight: Tensor | None = None

    def add(self, module: nn.Module) -> None:
        self._modules.append(module)

    def add_weight(self, weight: Tensor) -> None:
        """Adds to the weight of this rank in the next mean: its samples since the last mean.

        A rank with no samples left has outdated statistics.
        """
        self._weight = weight if self._weight is None else self._weight + weight

    def reset_weight(self) -> None:
        """Drops the weight; called when other buffers were loaded into the modules."""
        self._weight = None

    def average(self) -> None:
        """Puts the weighted mean over all ranks into the modules."""
        buffers = [buffer for module in self._modules for buffer in batch_norm_statistics(module)]
        if self._world.size > 1 and buffers:
            self._average(buffers)
        self.reset_weight()

    def _average(self, buffers: list[Tensor]) -> None:
        # One message for all: a ResNet-50 has a hundred small buffers. Those of a moving average
        # may lie on the host.
        device = buffers[-1].device
        flat = flatten([buffer.to(device, torch.float32) for buffer in buffers])
        weight = torch.ones(1) if self._weight is None else self._weight.view(1).clamp(min=1e-6)
        weight = weight.to(device, torch.float32)
        sums = total(self._world, torch.cat([flat * weight, weight]))
        unflatten_into(buffers, sums[:-1] / sums[-1])
