"""Images that look alike, by the cosine of their embeddings."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MOST = 100_000
"""Pairs that are kept, those with the highest cosine."""
_ROUNDING = 2e-6  # of cosines: those of a row and itself were 5e-7 below 1, of 32 to 4,096 columns


class Pairs(NamedTuple):
    numbers: NDArray[np.int64]  # [n, 2], the lower number first
    cosines: NDArray[np.float32]  # [n], the highest first


def near_duplicates(
    vectors: NDArray[np.float32], least: float, *, limit: int = MOST, block_rows: int = 4096
) -> Pairs:
    """The pairs of rows of float32[N, D] with a cosine of `least` or more, `limit` of them at most.

    Memory does not grow with N squared, time does: 100,000 rows of 512 take 5e12 multiplications.
    The cosines of `block_rows` with as many others are in memory at a time: 67 MB for 4096. Rows of
    zeros have no pair.
    """
    unit = torch.nn.functional.normalize(torch.from_numpy(vectors), dim=1)
    unit[~unit.any(dim=1)] = torch.nan  # which is no cosine
    numbers, cosines = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0)
    for first in range(0, len(unit), block_rows):
        rows = unit[first : first + block_rows]
        for second in range(first, len(unit), block_rows):
            block = rows @ unit[second : second + block_rows].T
            is_alike = block >= least - _ROUNDING
            pairs = (is_alike.triu(1) if first == second else is_alike).nonzero()
            pairs = pairs[block[pairs[:, 0], pairs[:, 1]].argsort(descending=True)[:limit]]
            new = block[pairs[:, 0], pairs[:, 1]]
            cosines = torch.cat([cosines, new])
            numbers = torch.cat([numbers, pairs + torch.tensor([first, second])])
            order = cosines.argsort(descending=True, stable=True)[:limit]
            cosines, numbers = cosines[order], numbers[order]
    return Pairs(numbers.numpy(), cosines.clamp(max=1).numpy())
