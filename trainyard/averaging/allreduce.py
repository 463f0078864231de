"""All-reduce: every replica takes the same step, along the mean gradient (torch's DDP)."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainyard.averaging.base import AverageConfig, Replica
from trainyard.averaging.hooks import PowerSgd, send_halves
from trainyard.averaging.statistics import Statistics
from trainyard.averaging.sync_bn import synchronise
from trainyard.world import World

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# Renamed in torch 2.15.
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
)


class AllReduce:
    """Parameters are equal everywhere at all times; batch-norm statistics are on demand."""

    def __init__(self, config: AverageConfig, world: World) -> None:
        self._config, self._world = config, world
        self._statistics = Statistics(world)  # of the model, and of what follows it
        self._parallel: DistributedDataParallel | None = None
        self._power_sgd: PowerSgd | None = None

    @property
    def replica(self) -> Replica:
        if self._power_sgd is None:
            return Replica()
        return Replica(self._world.rank, self._world.size, weights_differ=False)

    def wrap(self, model: nn.Module) -> nn.Module:
        self._statistics.add(model)
        if self._world.size > 1 and self._config.batch_norm == "sync":
            synchronise(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if self._world.size == 1:
            return model
        self._parallel = parallel(model)
        compress = self._config.compress
        if compress == "powersgd":
            self._power_sgd = PowerSgd(self._parallel)
        elif compress is not None:
            send_halves(self._parallel, compress)
        return self._parallel

    def follow(self, module: nn.Module) -> None:
        self._statistics.add(module)

    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight of the global batch over the number of replicas, whose mean DDP takes."""
        self._statistics.see(weight)
        return mean_weight(weight, self._world.size)

    def accumulating(self) -> AbstractContextManager[None]:
        return self._parallel.no_sync() if self._parallel else nullcontext()

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        if self._power_sgd is not None:
            self._power_sgd.settle(step)
        yield self._parameters

    @contextmanager
    def consensus(self) -> Iterator[None]:
        self._statistics.put_mean()
        yield

    def highest(self, value: Tensor) -> Tensor:
        return value

    def figures(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return self._power_sgd.state_dict() if self._power_sgd else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._statistics.forget()
        if self._power_sgd is not None:
            self._power_sgd.load_state_dict(state)


def parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """`model` with the mean of its gradients over the ranks of a group, or over all ranks.

    Buffers are not made equal: each replica keeps batch-norm statistics of its own samples. DDP's
    static_graph is left off: it spares a search for unused parameters, of which there is none
    here, and fails when a process begins under no_sync (pytorch pull request 187732), as the trial
    of a step does.
    """
    options: dict[str, Any] = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    _settle_buckets(wrapped)
    return wrapped


def _settle_buckets(parallel: DistributedDataParallel) -> None:
    """Make DDP's buckets now what they will be in every step.

    It cuts them when its second forward pass begins, in the order in which the first gradients
    came, and a sum over three ranks or more depends in its last bit on the place in a bucket: the
    first step after a resume would differ from that of a run that was not stopped. The gradients
    of a sum of all parameters come in reverse order, as those of nearly all models do.
    """
    model, parallel.module = parallel.module, _Sum(parallel.module)
    parallel().backward()
    for parameter in model.parameters():
        parameter.grad = None
    with parallel.no_sync():
        parallel()
    parallel.module = model


class _Sum(nn.Module):
    """The sum of the parameters that a model trains, added in its order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def forward(self) -> Tensor:
        return torch.stack([p.sum() for p in self._trained]).sum()


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
