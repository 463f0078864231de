"""Variation of compute times between ranks, which makes others wait."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Jitter:
    """Compute times, drawn independently for each rank and step."""

    sigma: float = 0.05
    """Standard deviation of the logarithm of a step's compute time."""
    stall_rate: float = 0.0
    """Stalls per rank and step: page faults, slow reads, garbage collection."""
    stall_seconds: float = 0.0

    def compute(self, seconds: float, *, steps: int, ranks: int, seed: int) -> Floats:
        """Times[steps, ranks] with a mean of `seconds`, before stalls."""
        draws = np.random.default_rng(seed)
        shape = (steps, ranks)
        normal = draws.standard_normal(shape)
        times = np.exp(self.sigma * normal)
        times *= seconds / times.mean()
        if self.stall_rate:
            times += self.stall_seconds * (draws.random(shape) < self.stall_rate)
        return times


EVEN = Jitter(sigma=0.0)
