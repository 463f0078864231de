"""The consensus: the mean of replicas that differ."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.averaging.flat import flatten, split_into_buckets, unflatten_into
from trainyard.averaging.statistics import batch_norm_statistics
from trainyard.world import World, total

_MESSAGE_BYTES = 2**26


class Consensus:
    """Puts the mean over all ranks into modules, and restores their own weights afterwards.

    A moving average is linear in the weights, so the mean of the moving averages is the moving
    average of the means.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._modules: list[nn.Module] = []
        self.own: list[dict[str, Any]] = []
        """Inside `applied`: this replica's own state of each module."""
        self.distance = 0.0
        """Root of the mean over replicas of the squared distance of the first module's parameters
        from their mean (Kong et al. 2021, equation 3)."""

    def add(self, module: nn.Module) -> None:
        self._modules.append(module)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the modules hold the mean; their own state returns bit by bit."""
        self.own = [_copy(module) for module in self._modules]
        try:
            self._apply()
            yield
        finally:
            self.load_own(self.own)
            self.own = []

    def _apply(self) -> None:
        """Puts the mean into the modules and measures the distance from it."""
        squared = torch.zeros(())
        for number, module in enumerate(self._modules):
            parameters = self._put_mean(list(module.parameters()))
            self._put_mean(batch_norm_statistics(module))
            squared = squared if number else parameters
        self.distance = float(total(self._world, squared) / self._world.size) ** 0.5

    def load_own(self, states: Sequence[dict[str, Any]]) -> None:
        # A checkpoint may hold one state more: that of a moving average this run does not keep.
        for module, state in zip(self._modules, states, strict=False):
            module.load_state_dict(state)

    @torch.no_grad()
    def _put_mean(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the squared distance of the tensors from their mean."""
        squared = torch.zeros(())
        for bucket in split_into_buckets(tensors, _MESSAGE_BYTES):
            # A moving average may lie on the host, where NCCL cannot send it.
            device = next(self._modules[0].parameters()).device
            own = flatten([tensor.to(device) for tensor in bucket])
            mean = total(self._world, own) / self._world.size
            squared = squared.to(device) + (own - mean).square().sum()
            unflatten_into(bucket, mean)
        return squared


def _copy(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
