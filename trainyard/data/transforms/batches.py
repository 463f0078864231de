"""Transforms of whole batches on the device: their interfaces, and the list for a recipe.

A transform is a pure function of a batch and keys, so a replay is exact, and the number of ranks
affects only the partners that a sample can be mixed with.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainyard.data.decode.interpolation import Interpolation
from trainyard.data.transforms.config import AugmentConfig
from trainyard.data.transforms.erasing import RandomErasing
from trainyard.data.transforms.jitter import ColorJitter
from trainyard.data.transforms.mixing import Mixing
from trainyard.data.transforms.randaugment.augment import RandAugment


class Keys(NamedTuple):
    """The keys of a batch's randomness, besides the run's seed; all on the host."""

    ids: NDArray[np.int64]  # [B], of the samples
    visits: NDArray[np.int64]  # [B], epoch index of each sample; see Plan.epochs
    position: int  # stream position of the global batch's first sample, equal on every rank


class MixedBatch(NamedTuple):
    """Images and targets; a target is `lam` of the one-hot label and 1 - `lam` of the mixed one."""

    images_BCHW: Tensor  # float32, normalised
    labels: Tensor  # int64[B]
    mixed_labels: Tensor  # int64[B]
    lam: Tensor  # float32[B]
    weights: Tensor  # float32[B], 0 for a bad sample, whose image is a placeholder, else 1


class PixelTransform(Protocol):
    def __call__(self, pixels_BCHW: Tensor, keys: Keys) -> Tensor:
        """Maps uint8[B, 3, H, W] in any layout to the same; may alter its input."""


class BatchTransform(Protocol):
    def __call__(self, batch: MixedBatch, keys: Keys) -> MixedBatch:
        """Transforms a batch; may alter its input."""


def pixel_transforms(
    config: AugmentConfig,
    *,
    seed: int,
    mean: tuple[float, float, float],
    interpolation: Interpolation,
) -> list[PixelTransform]:
    """Transforms of colour and shape, before normalising; `mean` fills uncovered pixels (timm)."""
    found: list[PixelTransform] = []
    if config.randaugment:
        found.append(
            RandAugment(config.randaugment, seed=seed, mean=mean, interpolation=interpolation)
        )
    if config.color_jitter:
        found.append(ColorJitter(config.color_jitter, seed=seed))
    return found


def batch_transforms(config: AugmentConfig, *, seed: int) -> list[BatchTransform]:
    """Transforms after normalising: erasing, then mixing, as in timm."""
    found: list[BatchTransform] = []
    if config.erasing:
        found.append(RandomErasing(config.erasing, config.erasing_mode, seed=seed))
    if config.mixes:
        found.append(Mixing(config, seed=seed))
    return found
