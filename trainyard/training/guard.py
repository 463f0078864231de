"""Counts skipped updates in a row, to decide when a run returns to a checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LOOK_EVERY = 10  # steps


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
        self._noted: _LateRead | None = None

    def add(self, skipped: Tensor) -> None:
        """`skipped` is 1 if a step's update was skipped, else 0."""
        self._running = (self._running + 1) * skipped

    def tripped(self, step: int) -> bool:
        """True if the run is to roll back, alike on every rank; checked at every tenth step.

        A run of skipped updates that has ended by then needs no rollback. The host waits for the
        device only if the count of the step before, which it gets late, is close to the limit.
        """
        if (step + 1) % _LOOK_EVERY == 0:
            self._noted = _LateRead(self._all_reduce_max(self._running))
        if step % _LOOK_EVERY:
            return False
        noted, self._noted = self._noted, None
        if noted is not None and noted.value() + 1 < self._limit:
            return False
        return int(self._all_reduce_max(self._running)) >= self._limit

    def settle(self) -> None:
        """Makes the count equal on all ranks; called before a save."""
        self._running = self._all_reduce_max(self._running)

    def state_dict(self) -> dict[str, Any]:
        return {"running": int(self._running)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running.fill_(state["running"])
        self._noted = None


class _LateRead:
    """A copy of a value to the host, which a later step waits for."""

    def __init__(self, value: Tensor) -> None:
        self._copy = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        self._copy.copy_(value, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if value.is_cuda else None

    def value(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._copy)
