"""Means over an interval of training, reduced over ranks when reported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainyard.monitor.clock import Clock
from trainyard.monitor.devices import Gauge
from trainyard.world import World


@dataclass(frozen=True)
class StepStats:
    """Sums over a rank's samples, on the device: reading one waits for the device."""

    # [K], one of each virtual rank that this rank works for, or []
    loss_sum: Tensor
    correct: Tensor
    count: Tensor
    grad_norm: Tensor  # of the whole gradient, before clipping
    skipped: Tensor  # 1 if the update was skipped because a gradient was not finite, else 0


class Meter:
    """Sums steps on the device; `report` synchronises, reduces over ranks and resets the sums."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        clock: Clock,
        ideal_s: Callable[[], float | None] = lambda: None,
        *,
        add_up: Callable[[Tensor], Tensor],
        has_top1: bool = True,
    ) -> None:
        """`ideal_s`: seconds per image of a device at its peak; None if not known.

        `has_top1`: False if the steps do not count correct samples. `add_up`: see Averager.
        """
        self._add_up = add_up
        self._has_top1 = has_top1
        self._world, self._device, self._clock = world, device, clock
        self._ideal_s, self._gauge = ideal_s, Gauge(device)
        self._grad_norm = torch.zeros((), device=device)
        self._reset()

    def add(self, stats: StepStats, capacity: float = 0.0) -> None:
        """`capacity`: images/s that the loader could make, by the batch; 0 if unknown."""
        # A step without an update counts as skipped and not in the means: its loss may be NaN.
        good = 1 - stats.skipped
        counted = torch.stack([stats.loss_sum, stats.correct, stats.count]).view(3, -1)
        means = counted.mul(good).nan_to_num()
        skipped = stats.skipped.expand(1, counted.shape[1])
        self._sums: Tensor = self._sums + torch.cat([means, counted[2:], skipped])
        self._grad_norm = torch.where(good > 0, stats.grad_norm, self._grad_norm)
        if capacity > 0:
            self._batches += 1
            self._loading += 1 / capacity

    def report(self) -> dict[str, Any]:
        """Mean loss and accuracy of the updates, and the gradient norm of the last update.

        Also images per second of training time, and the share of it spent waiting for data. If
        replicas differ, the norm is the first one's, and `skipped` the mean over replicas. `mfu` is
        the share of the devices' peak that the model's own arithmetic takes (Chowdhery et al. 2022,
        appendix B). The loaders of all ranks are taken to be as fast as this rank's. Memory, use
        and power are this rank's.
        """
        sums = self._add_up(self._sums)
        loss, correct, count, images, skipped = sums.tolist()
        training = self._clock.training - self._training_before
        waiting = self._clock.seconds("data") - self._waiting_before
        ideal_s = self._ideal_s()
        report = {
            "loss": loss / max(count, 1),
            **({"top1": correct / max(count, 1)} if self._has_top1 else {}),
            "grad_norm": float(self._grad_norm),
            "skipped": skipped / self._world.size / self._sums.shape[1],
            "images_per_s": images / training,
            "images_per_s_device": images / training / self._world.size,
            "images_per_s_loader": self._world.size * self._batches / self._loading
            if self._batches
            else None,
            "mfu": None if ideal_s is None else images / training / self._world.size * ideal_s,
            "data_wait": waiting / training,
            **self._gauge.read()._asdict(),
            "world_size": self._world.size,
        }
        self._reset()
        return report

    def _reset(self) -> None:
        # float64: a float32 sum over a million images would lose the last digits.
        self._sums = torch.zeros(5, 1, dtype=torch.float64, device=self._device)
        self._batches = 0  # whose capacity is known
        self._loading = 0.0  # seconds that the loader takes for an image, summed over them
        self._training_before = self._clock.training
        self._waiting_before = self._clock.seconds("data")
