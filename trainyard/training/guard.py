"""Counts skipped updates in a row, to decide when a run returns to a checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LOOK_EVERY = 10  # steps
_UNKNOWN = -1


class Guard:
    """Counts the updates skipped in a row.

    All ranks decide alike. Where a replica may skip an update by itself, the highest count decides.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int,
        all_reduce_max: Callable[[Tensor], Tensor] = lambda value: value,
        lag: int = 1,
    ) -> None:
        """`limit`: the number of updates skipped in a row after which the run rolls back.

        `lag`: the steps after which ranks know what they have told each other; at most 8.
        """
        self._limit, self._all_reduce_max, self.lag = limit, all_reduce_max, lag
        self._running = torch.zeros((), device=device)
        self._noted: _LateRead | None = None
        self._known = _UNKNOWN  # the highest count of all ranks, `lag` + 1 steps before a look

    def add(self, skipped: Tensor) -> None:
        """`skipped` is 1 if a step's update was skipped, else 0."""
        self._running = (self._running + 1) * skipped

    def told(self, step: int) -> int:
        """The count that a rank tells the others after a step; -1 after most steps.

        It is the count of the step before, which the host reads without a wait for the device.
        """
        noted, self._noted = self._noted, None
        if (step + self.lag + 1) % _LOOK_EVERY == 0:
            self._noted = _LateRead(self._running)
        return _UNKNOWN if noted is None else int(noted.value())

    def hear(self, highest: int) -> None:
        """Take note of the highest of the counts that all ranks have told."""
        self._known = max(self._known, highest)

    def tripped(self, step: int) -> bool:
        """True if the run is to roll back, alike on every rank; checked at every tenth step.

        A run of skipped updates that has ended by then needs no rollback. Ranks and devices are
        waited for only if the highest count that was heard of is close to the limit.
        """
        if step % _LOOK_EVERY:
            return False
        known, self._known = self._known, _UNKNOWN
        if known != _UNKNOWN and known + self.lag + 1 < self._limit:
            return False
        return int(self._all_reduce_max(self._running)) >= self._limit

    def share_count(self) -> None:
        """Makes the count equal on all ranks; called before a save."""
        self._running = self._all_reduce_max(self._running)

    def state_dict(self) -> dict[str, Any]:
        return {"running": int(self._running)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running.fill_(state["running"])
        self._noted, self._known = None, _UNKNOWN


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
