"""The common base of averagers that average weights: their replicas differ."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainyard.averaging.allreduce import mean_weight, wrap_in_ddp
from trainyard.averaging.base import Replica
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.consensus import Consensus
from trainyard.averaging.nodes import node_group
from trainyard.world import World


class WeightAverager(ABC):
    """A replica is a rank, or a node whose ranks all-reduce their gradients."""

    def __init__(self, config: AverageConfig, world: World) -> None:
        self.replica = Replica(world.rank, world.size)
        self._node = node_group(world) if config.hierarchical else None
        self._consensus = Consensus(world)
        self._ddp: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        _broadcast(model)
        self._consensus.add(model)
        self._prepare([parameter for parameter in model.parameters() if parameter.requires_grad])
        if self._node is None:
            return model
        self._ddp = wrap_in_ddp(model, self._node)
        return self._ddp

    @abstractmethod
    def _prepare(self, parameters: list[nn.Parameter]) -> None:
        """Allocates what the exchange of these parameters needs."""

    def register_ema(self, module: nn.Module) -> None:
        self._consensus.add(module)

    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight of the replica's samples: a rank's, or the mean over a node's ranks."""
        return mean_weight(weight, self._node.size() if self._node else 1, self._node)

    def accumulating(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync() if self._ddp else nullcontext()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        self._wait()
        with self._consensus.applied():
            yield

    @abstractmethod
    def _wait(self) -> None:
        """Waits for the pending exchange; its result is kept for the step that uses it."""

    def all_reduce_max(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def metrics(self) -> dict[str, float]:
        return {"consensus_distance": self._consensus.distance}


def _broadcast(module: nn.Module) -> None:
    """Gives every rank the weights and buffers of rank 0."""
    for tensor in module.state_dict().values():
        first = tensor.contiguous()
        dist.broadcast(first, 0)
        tensor.copy_(first)
