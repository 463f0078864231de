"""Statistics of batch norm: each rank's own, and their mean."""

import torch
from torch import Tensor, nn

from trainyard.averaging.flat import flatten, unflatten_into
from trainyard.world import World, total


def statistics(module: nn.Module) -> list[Tensor]:
    """Buffers with fractions that are saved; others are constants, which a mean would round."""
    saved = module.state_dict()
    named = module.named_buffers()
    return [buffer for name, buffer in named if name in saved and buffer.is_floating_point()]


class Statistics:
    """Of modules of which each rank has a replica."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._modules: list[nn.Module] = []
        self._seen: Tensor | None = None

    def add(self, module: nn.Module) -> None:
        self._modules.append(module)

    def see(self, weight: Tensor) -> None:
        """A rank counts in the next mean by the weight of its samples since the last one.

        One whose stream has run dry has statistics of long ago.
        """
        self._seen = weight if self._seen is None else self._seen + weight

    def forget(self) -> None:
        """What was seen before other buffers were put into the modules."""
        self._seen = None

    def put_mean(self) -> None:
        buffers = [buffer for module in self._modules for buffer in statistics(module)]
        if self._world.size > 1 and buffers:
            self._put_mean(buffers)
        self.forget()

    def _put_mean(self, buffers: list[Tensor]) -> None:
        # One message for all: there are a hundred small ones in a ResNet-50. Those of a moving
        # average may lie on the host.
        device = buffers[-1].device
        flat = flatten([buffer.to(device, torch.float32) for buffer in buffers])
        weight = torch.ones(1) if self._seen is None else self._seen.view(1).clamp(min=1e-6)
        weight = weight.to(device, torch.float32)
        sums = total(self._world, torch.cat([flat * weight, weight]))
        unflatten_into(buffers, sums[:-1] / sums[-1])
