"""Counts skipped updates in a row, to decide when a run returns to a checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LOOK_EVERY = 10  # steps: reading the count waits for the device


class Guard:
    """Counts the updates skipped in a row.

    All ranks decide alike. Where a replica may skip an update by itself, the highest count decides.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int,
        all_reduce_max: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        """`limit`: the number of updates skipped in a row after which the run rolls back."""
        self._limit, self._all_reduce_max = limit, all_reduce_max
        self._running = torch.zeros((), device=device)

    def add(self, skipped: Tensor) -> None:
        """`skipped` is 1 if a step's update was skipped, else 0."""
        self._running = (self._running + 1) * skipped

    def tripped(self, step: int) -> bool:
        """True if the run is to roll back, alike on every rank; checked at every tenth step.

        A run of skipped updates that has ended by then needs no rollback.
        """
        return step % _LOOK_EVERY == 0 and int(self._all_reduce_max(self._running)) >= self._limit

    def settle(self) -> None:
        """Makes the count equal on all ranks; called before a save."""
        self._running = self._all_reduce_max(self._running)

    def state_dict(self) -> dict[str, Any]:
        return {"running": int(self._running)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running.fill_(state["running"])
