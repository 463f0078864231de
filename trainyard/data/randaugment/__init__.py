from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from trainyard.data.transforms import Keys


class RandAugment:
    def __init__(self, policy: str, *, seed: int, mean: tuple[float, float, float]) -> None:
        raise NotImplementedError

    def __call__(self, pixels_BCHW: Tensor, keys: Keys) -> Tensor:
        raise NotImplementedError
