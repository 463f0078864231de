"""The order of samples: pure functions from a step to the sample ids of its global batch.

Nothing here knows ranks beyond a slice of positions, so the stream of ids is the same for every
world size, and the position of a run is one integer.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.data.keyed import fold, permute

Ids = NDArray[np.int64]


class Plan(Protocol):
    """What the loader needs of an order."""

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        """The ids that `rank` of `size` sees at `step`: element `rank::size` of the batch."""

    def epochs(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        """The epoch that each of those ids belongs to."""


@dataclass(frozen=True)
class ShuffledPlan:
    """An endless stream of epochs, each a permutation of its own, cut into equal batches.

    Batches run on across epoch borders, so none is short and no sample is dropped or repeated.
    """

    num_samples: int
    global_batch: int
    seed: int

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        positions = self._positions(step, rank, size)
        keys = fold(self.seed, positions // self.num_samples)
        return permute(positions % self.num_samples, keys, self.num_samples)

    def epochs(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        return self._positions(step, rank, size) // self.num_samples

    def _positions(self, step: int, rank: int, size: int) -> Ids:
        start = step * self.global_batch
        return np.arange(start + rank, start + self.global_batch, size, dtype=np.int64)


@dataclass(frozen=True)
class OnePassPlan:
    """Every sample once, in stored order; the last batch holds what is left."""

    num_samples: int
    global_batch: int

    @property
    def num_steps(self) -> int:
        return -(-self.num_samples // self.global_batch)

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        start = step * self.global_batch
        stop = min(start + self.global_batch, self.num_samples)
        return np.arange(start + rank, stop, size, dtype=np.int64)

    def epochs(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        return np.zeros_like(self.batch(step, rank, size))
