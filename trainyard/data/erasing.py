from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainyard.data.transforms import Keys, MixedBatch


class RandomErasing:
    def __init__(self, probability: float, mode: str, *, seed: int) -> None:
        raise NotImplementedError

    def __call__(self, batch: MixedBatch, keys: Keys) -> MixedBatch:
        raise NotImplementedError
