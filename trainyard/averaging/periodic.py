"""Periodic averaging: replicas train by themselves and average every so many steps."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trainyard.averaging.config import DEFAULT_EVERY, AverageConfig
from trainyard.averaging.flat import flatten, unflatten_into
from trainyard.averaging.weight_averager import WeightAverager
from trainyard.world import World, total


class Periodic(WeightAverager):
    """Local SGD (Stich 2019, arXiv 1805.09767; Lin et al. 2020, arXiv 1808.07217) and DiLoCo
    (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    All replicas start a period of `every` steps at the same weights, the anchor. The mean of their
    moves in the period is the gradient of an outer SGD with Nesterov momentum (torch's), which
    steps the anchor. All replicas restart at the new anchor. An outer rate of 1 without momentum
    gives the mean of the weights, up to rounding. Inner optimizers keep their state.

    The consensus is the mean of the replicas: the anchor lacks the steps since the last exchange.

    Weights of one replica that are not finite make the weights of all replicas so in the next
    exchange. All replicas then skip their updates and return to a checkpoint together.
    """

    def __init__(self, config: AverageConfig, world: World) -> None:
        super().__init__(config, world)
        self._every = config.every or DEFAULT_EVERY
        self._lr, self._momentum = config.outer_lr or 1.0, config.outer_momentum or 0.0

    def prepare(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._anchor = flatten(parameters)
        self._outer = torch.optim.SGD(
            [self._anchor], self._lr, self._momentum, nesterov=self._momentum > 0
        )

    def ready_parameters(self, step: int, divisible: bool) -> Iterator[Sequence[nn.Parameter]]:
        yield self._parameters
        if (step + 1) % self._every == 0:
            self._end_period()

    @torch.no_grad()
    def _end_period(self) -> None:
        moved = self._anchor - flatten(self._parameters)
        self._anchor.grad = total(self._world, moved) / self._world.size
        self._outer.step()
        self._anchor.grad = None
        unflatten_into(self._parameters, self._anchor)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"own": self._states, "anchor": self._anchor}
        if self._momentum:  # None before the first exchange
            state["momentum"] = self._outer.state[self._anchor].get("momentum_buffer")
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A state saved with other options counts as empty: training resumes from the mean."""
        self._outer.state.clear()
        if state.keys() != self.state_dict().keys():
            self._anchor.copy_(flatten(self._parameters))
            return
        self._load_own(state["own"])
        self._anchor.copy_(state["anchor"])
        if state.get("momentum") is not None:
            momentum = state["momentum"].to(self._anchor.device)
            self._outer.state[self._anchor]["momentum_buffer"] = momentum
