from __future__ import annotations

from typing import TYPE_CHECKING

from trainyard.data.augment import AugmentConfig

if TYPE_CHECKING:
    from trainyard.data.transforms import Keys, MixedBatch


class Mixing:
    def __init__(self, config: AugmentConfig, *, seed: int) -> None:
        raise NotImplementedError

    def __call__(self, batch: MixedBatch, keys: Keys) -> MixedBatch:
        raise NotImplementedError
