"""All-reduce: every replica takes the same step, along the mean gradient (torch's DDP)."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainyard.averaging.base import AverageConfig, Replica
from trainyard.world import World, total

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# Renamed in torch 2.15.
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
)


class AllReduce:
    """Parameters are equal everywhere at all times; batch-norm statistics are on demand."""

    replica = Replica()

    def __init__(self, config: AverageConfig, world: World) -> None:
        self._config, self._world = config, world
        self._modules: list[nn.Module] = []  # the model, and what follows it
        self._parallel: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        self._modules.append(model)
        if self._world.size == 1:
            return model
        # Each replica keeps batch-norm statistics of its own samples; consensus() averages them.
        options: dict[str, Any] = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}
        self._parallel = DistributedDataParallel(model, **options)
        return self._parallel

    def follow(self, module: nn.Module) -> None:
        self._modules.append(module)

    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight of the global batch over the number of replicas, whose mean DDP takes."""
        return mean_weight(weight, self._world.size)

    def accumulating(self) -> AbstractContextManager[None]:
        return self._parallel.no_sync() if self._parallel else nullcontext()

    def before_update(self, step: int) -> None:
        pass

    def after_update(self, step: int) -> None:
        pass

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if self._world.size > 1:
            self._average_buffers()
        yield

    def highest(self, value: Tensor) -> Tensor:
        return value

    def figures(self) -> dict[str, float]:
        return {}

    def _average_buffers(self) -> None:
        every = [buffer for module in self._modules for buffer in module.buffers()]
        buffers = [buffer for buffer in every if buffer.is_floating_point()]
        if not buffers:
            return
        # One message for all of them: there are a hundred small ones in a ResNet-50. Those of a
        # moving average may lie on the host.
        device = buffers[-1].device
        flat = torch.cat([buffer.reshape(-1).to(device, torch.float32) for buffer in buffers])
        mean = total(self._world, flat) / self._world.size
        parts = torch.split(mean, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def mean_weight(
    weight: Tensor, size: int, group: dist.ProcessGroup | None = None
) -> Callable[[], Tensor]:
    """The mean of the weights of a group's `size` ranks, or of all; known once it is asked for.

    At least one sample's among them all, for a batch in which every sample is bad.
    """
    total_weight = weight.clone()
    if size == 1:
        return lambda: total_weight.clamp(min=1)
    work: Any = dist.all_reduce(total_weight, group=group, async_op=True)

    def value() -> Tensor:
        work.wait()
        return total_weight.clamp(min=1) / size

    return value
