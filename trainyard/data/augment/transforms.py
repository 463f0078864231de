"""Transforms of whole batches on the device: their interfaces, and the list for a recipe.

A transform is a pure function of a batch and keys, so a replay is exact, and the number of ranks
affects only the partners that a sample can be mixed with, and the user's own transform.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainyard.data.augment.config import AugmentConfig
from trainyard.data.augment.erasing import RandomErasing
from trainyard.data.augment.extra import Extra, Targets
from trainyard.data.augment.jitter import ColorJitter
from trainyard.data.augment.mixing import Mixing
from trainyard.data.augment.randaugment import RandAugment
from trainyard.data.batch import Batch, Keys
from trainyard.data.rng import TRANSLATIONS, fold_in, uniforms
from trainyard.errors import RecipeError


class Translate:
    """Moves each image by up to `pixels` whole pixels in each direction, and reflects its borders.

    That is torchvision's RandomCrop of the image's own size with reflecting padding. Offsets are
    uniform, and drawn for each sample by (seed, visit, id) alone.
    """

    def __init__(self, pixels: int, *, seed: int) -> None:
        self._pixels, self._seed = pixels, seed

    def __call__(self, pixels_BCHW: Tensor, keys: Keys) -> Tensor:
        height, width = pixels_BCHW.shape[2:]
        if self._pixels >= min(height, width):
            raise RecipeError(
                "recipe.translate-too-large",
                "augment.translate = {value} is no less than the image's side, {size} pixels: "
                "lower it",
                value=self._pixels,
                size=min(height, width),
            )
        key = fold_in(self._seed, np.full_like(keys.ids, TRANSLATIONS), keys.visits, keys.ids)
        drawn = np.floor(uniforms(key, 2) * (2 * self._pixels + 1)).astype(np.int64) - self._pixels
        # One copy, small enough that the driver does not wait for the device.
        offsets = torch.from_numpy(drawn).to(pixels_BCHW.device, non_blocking=True)
        rows_BH = _reflected(offsets[:, :1], height)
        columns_BW = _reflected(offsets[:, 1:], width)
        images_BHWC = pixels_BCHW.permute(0, 2, 3, 1)
        image_B = torch.arange(len(offsets), device=offsets.device)
        moved_BHWC = images_BHWC[image_B[:, None, None], rows_BH[:, :, None], columns_BW[:, None]]
        return moved_BHWC.permute(0, 3, 1, 2)


def _reflected(offsets_B1: Tensor, side: int) -> Tensor:
    """Source positions of the pixels 0 to `side` - 1 of moved images: int64[B, side]."""
    positions = torch.arange(side, device=offsets_B1.device) + offsets_B1
    last = side - 1
    return last - (last - positions.abs()).abs()


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
    config: AugmentConfig, *, seed: int, rank: int = 0, multi_hot: Targets | None = None
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
