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


class SharedStatistics:
    """Keeps the batch norm statistics of a model equal on all ranks.

    The mean of every step is the mean over the run, since running statistics are linear in those
    of batches. One taken at evaluations and saves alone would make the result depend on the times
    of saves.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._buffers: list[Tensor] = []
        self._weight: Tensor | None = None

    def add(self, module: nn.Module) -> None:
        """Adds a model, on its device."""
        self._buffers += batch_norm_statistics(module)

    def weigh(self, weight: Tensor) -> None:
        """Sets the weight of this rank in the mean: that of its samples in the step."""
        self._weight = weight

    def average(self) -> None:
        """Puts the weighted mean over all ranks into the model."""
        if self._world.size == 1 or not self._buffers or self._weight is None:
            return
        # One message for all: a ResNet-50 has a hundred small buffers. In float64 the mean of equal
        # values, such as constants and the statistics of frozen layers, is that value.
        flat = flatten([buffer.double() for buffer in self._buffers])
        weight = self._weight.detach().view(1).to(flat)
        sums = total(self._world, torch.cat([flat * weight, weight]))
        unflatten_into(self._buffers, sums[:-1] / sums[-1])
