"""The common base of averagers that average weights: each rank is a replica of its own."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from trainyard.averaging.allreduce import mean_weight
from trainyard.averaging.base import Averager, Replica
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.flat import flatten, split_into_buckets, unflatten_into
from trainyard.averaging.statistics import batch_norm_statistics
from trainyard.world import World, total

_MESSAGE_BYTES = 2**26


class WeightAverager(Averager):
    """The consensus is the mean of the replicas.

    A moving average is linear in the weights, so the mean of the moving averages is the moving
    average of the means.
    """

    def __init__(self, config: AverageConfig, world: World) -> None:
        super().__init__(config, world)
        self.replica = Replica(world.rank, world.size)
        self._modules: dict[str, nn.Module] = {}  # "" is the model, others its moving averages
        self._states: dict[str, dict[str, Any]] = {}  # inside `consensus`: each module's own state
        self._distance = 0.0

    def wrap(self, model: nn.Module) -> nn.Module:
        _broadcast(model)
        self._modules[""] = model
        self.prepare([parameter for parameter in model.parameters() if parameter.requires_grad])
        return model

    @abstractmethod
    def prepare(self, parameters: list[nn.Parameter]) -> None:
        """Allocates what the exchange of these parameters needs."""

    def register_emas(self, emas: Mapping[str, nn.Module]) -> None:
        self._modules |= emas

    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight of the replica's own samples."""
        self.weight = weight.clone()
        return mean_weight(self.weight, 1)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Afterwards each replica's own state returns bit by bit."""
        self._states = {name: _copy(module) for name, module in self._modules.items()}
        try:
            self._apply_mean()
            yield
        finally:
            self._load_own(self._states)
            self._states = {}

    def all_reduce_max(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def metrics(self) -> dict[str, float]:
        """consensus_distance: the root mean square, over the replicas, of the distance of their
        parameters from the mean (Kong et al. 2021, equation 3)."""
        return {"consensus_distance": self._distance}

    def state_dict(self) -> dict[str, Any]:
        return {"own": self._states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; that of another averager fits too if it has a replica's own weights."""
        if "own" in state:
            self._load_own(state["own"])

    def _apply_mean(self) -> None:
        """Puts the mean into the modules and measures the distance from it."""
        squared = torch.zeros(())
        for name, module in self._modules.items():
            parameters = self.put_mean(list(module.parameters()))
            self.put_mean(batch_norm_statistics(module))
            squared = squared if name else parameters
        self._distance = float(total(self._world, squared) / self._world.size) ** 0.5

    @torch.no_grad()
    def put_mean(self, tensors: Sequence[Tensor]) -> Tensor:
        """Give all replicas the mean of tensors. Returns the squared distance of these from it."""
        squared = torch.zeros(())
        for bucket in split_into_buckets(tensors, _MESSAGE_BYTES):
            # A moving average may lie on the host, where NCCL cannot send it.
            device = next(self._modules[""].parameters()).device
            flat = flatten([tensor.to(device) for tensor in bucket])
            mean = total(self._world, flat) / self._world.size
            squared = squared.to(device) + (flat - mean).square().sum()
            unflatten_into(bucket, mean)
        return squared

    def _load_own(self, states: Mapping[str, dict[str, Any]]) -> None:
        for name, module in self._modules.items():
            module.load_state_dict(states[name])


def _copy(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _broadcast(module: nn.Module) -> None:
    """Gives every rank the weights and buffers of rank 0."""
    for tensor in module.state_dict().values():
        first = tensor.contiguous()
        dist.broadcast(first, 0)
        tensor.copy_(first)
