"""All-reduce: every replica takes the same step along the mean gradient (torch's DDP)."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainyard.averaging.base import EqualReplicas
from trainyard.averaging.compress import compress
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.statistics import SharedStatistics
from trainyard.averaging.sync_bn import convert_to_sync
from trainyard.world import World

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# Renamed in torch 2.15.
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
)


class AllReduce(EqualReplicas):
    """Parameters and batch norm statistics are equal on all ranks after every step."""

    def __init__(self, config: AverageConfig, world: World) -> None:
        super().__init__(config, world)
        if world.size > 1 and config.batch_norm == "sync":
            self.waits_in_forward = "average.batch_norm = 'sync'"
        self._statistics = SharedStatistics(world)
        self._ddp: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.waits_in_forward:
            convert_to_sync(model)
        else:
            self._statistics.add(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if self._world.size == 1:
            return model
        self._ddp = wrap_in_ddp(model)
        if self._config.compress is not None:
            compress(self._ddp, self._config.compress)
        return self._ddp

    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight of the global batch over that of replicas: DDP and FSDP take their mean."""
        self._statistics.weigh(weight)
        self.weight = weight.clone()
        return mean_weight(self.weight, self._world.size)

    def accumulating(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync() if self._ddp else nullcontext()

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        self._statistics.average()
        yield self._parameters


def wrap_in_ddp(model: nn.Module) -> DistributedDataParallel:
    """Wraps `model` in DDP, which averages its gradients over all ranks.

    Buffers are not synchronised: each replica keeps batch norm statistics of its own samples. DDP's
    static_graph is off: it spares a search for unused parameters, which is off here anyway, and
    fails when a process starts under no_sync (pytorch pull request 187732), as the search for a
    micro-batch does.
    """
    options: dict[str, Any] = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}
    ddp = DistributedDataParallel(model, **options)
    _fix_buckets(ddp)
    return ddp


def _fix_buckets(ddp: DistributedDataParallel) -> None:
    """Makes DDP choose its final buckets now.

    DDP chooses them when its second forward pass starts, by the order of the first gradients. The
    last bit of a sum over three ranks or more depends on the place in a bucket, so the first step
    after a resume would differ from that of an uninterrupted run. The gradients of a sum of all
    parameters come in reverse order, like those of nearly all models.
    """
    model, ddp.module = ddp.module, _Sum(ddp.module)
    ddp().backward()
    for parameter in model.parameters():
        parameter.grad = None
    with ddp.no_sync():
        ddp()
    ddp.module = model


class _Sum(nn.Module):
    """The sum of the trained parameters of a model, added in its order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def forward(self) -> Tensor:
        return torch.stack([p.sum() for p in self._trained]).sum()


def mean_weight(weight: Tensor, size: int) -> Callable[[], Tensor]:
    """The mean weight over all `size` ranks; the function waits for it.

    `weight` becomes the total. The mean is that of at least 1, also for a batch without a good
    sample.
    """
    if size == 1:
        return lambda: weight.clamp(min=1)
    work: Any = dist.all_reduce(weight, async_op=True)

    def value() -> Tensor:
        work.wait()
        return weight.clamp(min=1) / size

    return value
