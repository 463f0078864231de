"""Random translation of whole batches on the device, as in the usual training on CIFAR."""

import numpy as np
import torch
from torch import Tensor

from trainyard.data.batch import Keys
from trainyard.data.rng import fold_in, uniforms
from trainyard.errors import RecipeError

_STREAM = 13  # keeps translations independent of other uses of the same seed


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
                "recipe.translate-too-large", value=self._pixels, size=min(height, width)
            )
        key = fold_in(self._seed, np.full_like(keys.ids, _STREAM), keys.visits, keys.ids)
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
