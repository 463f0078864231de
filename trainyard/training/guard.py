"""When gradients stop being finite: counting, and going back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LOOK_EVERY = 10  # steps: to look is to wait for the device


class Guard:
    """Counts the updates that were skipped running.

    All ranks decide alike: where replicas may skip an update each by itself, by the highest count.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int,
        highest: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        """`limit`: updates skipped running, after which the run is to go back."""
        self._limit, self._highest = limit, highest
        self._running = torch.zeros((), device=device)

    def add(self, skipped: Tensor) -> None:
        """`skipped` is 1 if a step's update was, else 0."""
        self._running = (self._running + 1) * skipped

    def tripped(self, step: int) -> bool:
        """Whether to go back, the same on every rank; it looks at every tenth step.

        A run of skipped updates that is over by then needs no going back.
        """
        return step % _LOOK_EVERY == 0 and int(self._highest(self._running)) >= self._limit

    def settle(self) -> None:
        """Before it is saved: count alike."""
        self._running = self._highest(self._running)

    def state_dict(self) -> dict[str, Any]:
        return {"running": int(self._running)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running.fill_(state["running"])
