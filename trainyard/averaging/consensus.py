"""Replicas that differ, and their mean."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainyard.averaging.flat import flatten, unflatten_into
from trainyard.averaging.statistics import statistics
from trainyard.world import World, total

_MESSAGE_BYTES = 2**26
T = TypeVar("T", bound=Tensor)


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
        try:
            self._measure()
            yield
        finally:
            self.put_own(self._own)
            self._own = []

    def _measure(self) -> None:
        """Put the mean into the modules, and see how far it is."""
        squared = torch.zeros(())
        for number, module in enumerate(self._modules):
            parameters = self._put_mean(list(module.parameters()))
            self._put_mean(statistics(module))
            squared = squared if number else parameters
        self.distance = float(total(self._world, squared) / self._world.size) ** 0.5

    def own(self) -> list[dict[str, Any]]:
        """Inside: the state of each module as this replica had it."""
        return self._own

    def put_own(self, states: Sequence[dict[str, Any]]) -> None:
        # There may be one more: a run that goes on from another's checkpoint may do so without a
        # moving average.
        for module, state in zip(self._modules, states, strict=False):
            module.load_state_dict(state)

    @torch.no_grad()
    def _put_mean(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns how far, squared, the mean is from here."""
        squared = torch.zeros(())
        for some in stretches(tensors, _MESSAGE_BYTES):
            # A moving average may lie on the host: what is sent lies where the group can send it.
            device = next(self._modules[0].parameters()).device
            own = flatten([tensor.to(device) for tensor in some])
            mean = total(self._world, own) / self._world.size
            squared = squared.to(device) + (own - mean).square().sum()
            unflatten_into(some, mean)
        return squared


def _copy(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def stretches(
    tensors: Iterable[T], num_bytes: int, first_bytes: int | None = None
) -> Iterator[list[T]]:
    """Tensors in their order, as many of one kind of number at a time as have `num_bytes`.

    The first have `first_bytes`, if given, and each of the next ones four times as many.
    """
    some: list[T] = []
    total_bytes, most_bytes = 0, min(first_bytes or num_bytes, num_bytes)
    for tensor in tensors:
        is_full = total_bytes + tensor.nbytes > most_bytes
        if some and (is_full or tensor.dtype != some[0].dtype):
            yield some
            some, total_bytes = [], 0
            most_bytes = min(4 * most_bytes, num_bytes)
        some.append(tensor)
        total_bytes += tensor.nbytes
    if some:
        yield some
