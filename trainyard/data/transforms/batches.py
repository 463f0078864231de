"""What happens to whole batches on the device: which transforms, and what they are given.

A transform is a pure function of a batch and of keys, so a replay is exact and the number of
ranks changes nothing but the partners that a sample can be mixed with.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainyard.data.augment import AugmentConfig
from trainyard.data.decode import Interpolation
from trainyard.data.transforms.erasing import RandomErasing
from trainyard.data.transforms.jitter import ColorJitter
from trainyard.data.transforms.mixing import Mixing
from trainyard.data.transforms.randaugment.augment import RandAugment


class Keys(NamedTuple):
    """What the randomness of a batch is keyed by, beside the run's seed; all on the host."""

    ids: NDArray[np.int64]  # [B], of the samples
    visits: NDArray[np.int64]  # [B], which visit to its sample each is; see Plan.epochs
    position: int  # of the global batch's first sample in the stream: the same on every rank


class MixedBatch(NamedTuple):
    """Images and targets: `lam` of the one-hot label and 1 - `lam` of the other one."""

    images_BCHW: Tensor  # float32, normalised
    labels: Tensor  # int64[B]
    mixed_labels: Tensor  # int64[B]
    lam: Tensor  # float32[B]
    weights: Tensor  # float32[B], 0 for a bad sample, whose image is a placeholder, else 1


class PixelTransform(Protocol):
    def __call__(self, pixels_BCHW: Tensor, keys: Keys) -> Tensor:
        """uint8[B, 3, H, W] in any layout to the same; the input may be altered."""


class BatchTransform(Protocol):
    def __call__(self, batch: MixedBatch, keys: Keys) -> MixedBatch:
        """The input may be altered."""


def pixel_transforms(
    config: AugmentConfig,
    *,
    seed: int,
    mean: tuple[float, float, float],
    interpolation: Interpolation,
) -> list[PixelTransform]:
    """Colours and shapes, before normalising; `mean` fills what a shape uncovers, as in timm."""
    found: list[PixelTransform] = []
    if config.randaugment:
        found.append(
            RandAugment(config.randaugment, seed=seed, mean=mean, interpolation=interpolation)
        )
    if config.color_jitter:
        found.append(ColorJitter(config.color_jitter, seed=seed))
    return found


def batch_transforms(config: AugmentConfig, *, seed: int) -> list[BatchTransform]:
    """Erasing, then mixing, after normalising, as in timm."""
    found: list[BatchTransform] = []
    if config.erasing:
        found.append(RandomErasing(config.erasing, config.erasing_mode, seed=seed))
    if config.mixes:
        found.append(Mixing(config, seed=seed))
    return found
