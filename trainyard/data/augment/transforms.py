"""Transforms of whole batches on the device: their interfaces, and the list for a recipe.

A transform is a pure function of a batch and keys, so a replay is exact, and the number of ranks
affects only the partners that a sample can be mixed with, and the user's own transform.
"""

from typing import Protocol

from torch import Tensor

from trainyard.data.augment.config import AugmentConfig
from trainyard.data.augment.erasing import RandomErasing
from trainyard.data.augment.extra import Extra, MultiHot
from trainyard.data.augment.jitter import ColorJitter
from trainyard.data.augment.mixing import Mixing
from trainyard.data.augment.randaugment import RandAugment
from trainyard.data.augment.translate import Translate
from trainyard.data.batch import Batch, Keys


class PixelTransform(Protocol):
    def __call__(self, pixels_BCHW: Tensor, keys: Keys) -> Tensor:
        """Maps uint8[B, C, H, W] in any layout to the same; may alter its input."""


class BatchTransform(Protocol):
    def __call__(self, batch: Batch, keys: Keys) -> Batch:
        """Transforms a batch; may alter its input."""


def pixel_transforms(
    config: AugmentConfig, *, seed: int, mean: tuple[float, ...]
) -> list[PixelTransform]:
    """Transforms of colour and shape, before normalising; `mean` fills uncovered pixels (timm)."""
    chosen: list[PixelTransform] = []
    if config.translate:
        chosen.append(Translate(config.translate, seed=seed))
    if config.randaugment:
        chosen.append(RandAugment(config.randaugment, seed=seed, mean=mean))
    if config.color_jitter:
        chosen.append(ColorJitter(config.color_jitter, seed=seed))
    return chosen


def batch_transforms(
    config: AugmentConfig, *, seed: int, rank: int = 0, multi_hot: MultiHot | None = None
) -> list[BatchTransform]:
    """Transforms after normalising: erasing, then mixing, as in DeiT and ConvNeXt, then the user's
    own. timm's train.py mixes first: with mixup, half as many pixels are erased there.

    `multi_hot` makes the targets that the user's own gets for lists of labels; see Extra.
    """
    chosen: list[BatchTransform] = []
    if config.erasing:
        chosen.append(RandomErasing(config.erasing, config.erasing_mode, seed=seed))
    if config.mixes:
        chosen.append(Mixing(config, seed=seed))
    if config.extra is not None:
        chosen.append(Extra(config.extra, seed=seed, rank=rank, multi_hot=multi_hot))
    return chosen
