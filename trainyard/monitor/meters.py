"""What a stretch of training came to, summed over ranks when it is reported."""

from typing import Any, Protocol

import torch
from torch import Tensor

from trainyard.monitor.clock import Clock
from trainyard.world import World, total


class Stats(Protocol):
    """Sums of one step, on the device."""

    @property
    def loss_sum(self) -> Tensor: ...
    @property
    def correct(self) -> Tensor: ...
    @property
    def count(self) -> Tensor: ...
    @property
    def grad_norm(self) -> Tensor: ...
    @property
    def skipped(self) -> Tensor: ...
    @property
    def update_ratio(self) -> Tensor | None: ...


class Meter:
    """Adds steps on the device; `report` waits for it, adds up the ranks and starts afresh."""

    def __init__(self, world: World, device: torch.device, clock: Clock) -> None:
        self._world, self._device, self._clock = world, device, clock
        self._update_ratio: Tensor | None = None
        self._reset()

    def add(self, stats: Stats) -> None:
        sums = [stats.loss_sum, stats.correct, stats.count]
        # A step without an update counts as skipped, not into the means: its loss may be no number.
        self._sums += torch.stack(sums).mul(1 - stats.skipped).nan_to_num()
        self._skipped += stats.skipped
        self._grad_norm, self._update_ratio = stats.grad_norm, stats.update_ratio

    def report(self) -> dict[str, Any]:
        """Mean loss and accuracy, images per second of training time, share of it spent waiting."""
        loss, correct, count = total(self._world, self._sums).tolist()
        training = self._training_seconds() - self._training_before
        waiting = self._clock.seconds("data") - self._waiting_before
        report = {
            "loss": loss / max(count, 1),
            "top1": correct / max(count, 1),
            "grad_norm": float(self._grad_norm),
            "update_ratio": None if self._update_ratio is None else float(self._update_ratio),
            "skipped": int(self._skipped),
            "images_per_s": count / training,
            "data_wait": waiting / training,
        }
        self._reset()
        return report

    def _reset(self) -> None:
        # float64: a float32 sum of a million images would drop the last digits.
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        self._grad_norm = torch.zeros((), device=self._device)
        self._update_ratio = None
        self._skipped: Tensor = torch.zeros((), device=self._device)
        self._training_before = self._training_seconds()
        self._waiting_before = self._clock.seconds("data")

    def _training_seconds(self) -> float:
        return self._clock.total - self._clock.seconds("eval") - self._clock.seconds("save")
