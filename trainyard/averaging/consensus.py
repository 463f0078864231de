"""Replicas that differ, and their mean."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.world import World, total

_MESSAGE_BYTES = 2**26


class Consensus:
    """The mean of modules over all ranks, taken and given back.

    A moving average is linear in the weights: the mean of the averages is that of the means.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._modules: list[nn.Module] = []
        self._own: list[dict[str, Any]] = []  # inside, what the modules had
        self.distance = 0.0
        """Root of the mean over replicas of the squared distance of the first module's parameters
        from their mean (Kong et al. 2021, equation 3)."""

    def add(self, module: nn.Module) -> None:
        self._modules.append(module)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The modules hold the mean; then, bit by bit, what they had."""
        self._own = [_copy(module) for module in self._modules]
        squared = torch.zeros(())
        for number, module in enumerate(self._modules):
            parameters = self._put_mean(list(module.parameters()))
            self._put_mean([buffer for buffer in module.buffers() if buffer.is_floating_point()])
            squared = squared if number else parameters
        self.distance = float(total(self._world, squared) / self._world.size) ** 0.5
        try:
            yield
        finally:
            self.put_own(self._own)
            self._own = []

    def own(self) -> list[dict[str, Any]]:
        """Inside: the state of each module as this replica had it."""
        return self._own

    def put_own(self, states: Sequence[dict[str, Any]]) -> None:
        for module, state in zip(self._modules, states, strict=True):
            module.load_state_dict(state)

    @torch.no_grad()
    def _put_mean(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns how far, squared, the mean is from here."""
        squared = torch.zeros(())
        for some in _messages(tensors):
            # A moving average may lie on the host: what is sent lies where the group can send it.
            device = next(self._modules[0].parameters()).device
            own = torch.cat([tensor.reshape(-1).to(device) for tensor in some])
            mean = total(self._world, own) / self._world.size
            squared = squared.to(device) + (own - mean).square().sum()
            parts = torch.split(mean, [tensor.numel() for tensor in some])
            for tensor, part in zip(some, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        return squared


def _copy(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Stretches of one kind of number, of a size that is well sent and needs little memory."""
    some: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        is_full = num_bytes + tensor.nbytes > _MESSAGE_BYTES
        if some and (is_full or tensor.dtype != some[0].dtype):
            yield some
            some, num_bytes = [], 0
        some.append(tensor)
        num_bytes += tensor.nbytes
    if some:
        yield some
