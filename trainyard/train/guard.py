"""When gradients stop being finite: counting, and going back."""

from typing import Any

import torch
from torch import Tensor

_LOOK_EVERY = 10  # steps: to look is to wait for the device


class Guard:
    """Counts updates that were skipped, in all and running. All ranks count alike."""

    def __init__(self, device: torch.device, limit: int) -> None:
        """`limit`: updates skipped running, after which the run is to go back."""
        self._limit = limit
        self._running = torch.zeros((), device=device)
        self._total = torch.zeros((), device=device)

    def tripped(self, skipped: Tensor, step: int) -> bool:
        """Whether to go back, the same on every rank; `skipped` is 1 if the step's update was.

        To be asked once after every step.
        """
        self._running = (self._running + 1) * skipped
        self._total += skipped
        return step % _LOOK_EVERY == 0 and int(self._running) >= self._limit

    def state_dict(self) -> dict[str, Any]:
        return {"running": int(self._running), "total": int(self._total)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running.fill_(state["running"])
        self._total.fill_(state["total"])
