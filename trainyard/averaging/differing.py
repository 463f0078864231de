"""What averagers have in common whose replicas have weights of their own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainyard.averaging.allreduce import mean_weight, parallel
from trainyard.averaging.base import AverageConfig, Replica
from trainyard.averaging.consensus import Consensus
from trainyard.averaging.nodes import node_group
from trainyard.world import World


class Differing(ABC):
    """A replica is a rank, or a node in which gradients are all-reduced."""

    def __init__(self, config: AverageConfig, world: World) -> None:
        self.replica = Replica(world.rank, world.size)
        self._node = node_group(world) if config.hierarchical else None
        self._consensus = Consensus(world)
        self._parallel: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        _start_alike(model)
        self._consensus.add(model)
        self._prepare([parameter for parameter in model.parameters() if parameter.requires_grad])
        if self._node is None:
            return model
        self._parallel = parallel(model, self._node)
        return self._parallel

    @abstractmethod
    def _prepare(self, parameters: list[nn.Parameter]) -> None:
        """Be ready to mix them with those of other replicas."""

    def follow(self, module: nn.Module) -> None:
        self._consensus.add(module)

    def divisor(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight of the replica's own samples, or the mean of those of its node's ranks."""
        return mean_weight(weight, self._node.size() if self._node else 1, self._node)

    def accumulating(self) -> AbstractContextManager[None]:
        return self._parallel.no_sync() if self._parallel else nullcontext()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        self._settle()
        with self._consensus.inside():
            yield

    @abstractmethod
    def _settle(self) -> None:
        """Wait for what is under way; it is kept for when it is due."""

    def highest(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def figures(self) -> dict[str, float]:
        return {"consensus_distance": self._consensus.distance}


def _start_alike(module: nn.Module) -> None:
    """Give every rank the first one's weights and buffers."""
    for tensor in module.state_dict().values():
        first = tensor.contiguous()
        dist.broadcast(first, 0)
        tensor.copy_(first)
