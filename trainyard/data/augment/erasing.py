"""Random erasing (Zhong et al. 2017) of a normalised batch on the device, as in timm."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainyard.data.arrays import Ints
from trainyard.data.batch import Batch, Keys
from trainyard.data.rng import ERASING, UInt64s, between, fold_in, uniforms

_ATTEMPTS = 10  # this and the limits as in timm
_AREA = (0.02, 1 / 3)  # share of the image
_LOG_ASPECT = (math.log(0.3), math.log(1 / 0.3))  # logarithm of height over width


class _Boxes(NamedTuple):
    rows: Ints  # [n], positions of images in the batch
    tops: Ints
    lefts: Ints
    heights: Ints
    widths: Ints


class RandomErasing:
    """Replaces a rectangle of some images by noise ("pixel"), a random colour ("rand"), or zero.

    Keyed by (seed, visit, sample), including the noise: it is a hash of the sample's key and the
    position in the rectangle, so it is equal on any number of ranks and, up to rounding, on any
    device.
    """

    def __init__(self, probability: float, mode: str, *, seed: int) -> None:
        self._probability, self._mode, self._seed = probability, mode, seed

    def __call__(self, batch: Batch, keys: Keys) -> Batch:
        height, width = batch.images_BCHW.shape[2:]
        boxes = self._boxes(keys, height, width)
        if len(boxes.rows):
            self._fill(batch.images_BCHW, boxes, self._keys(keys, 1)[boxes.rows].view(np.int64))
        return batch

    def _keys(self, keys: Keys, use: int) -> UInt64s:
        stream = np.full_like(keys.ids, ERASING)
        return fold_in(self._seed, stream, keys.visits, keys.ids, np.full_like(keys.ids, use))

    def _boxes(self, keys: Keys, height: int, width: int) -> _Boxes:
        """For each image to erase, the first of ten tries that fits inside."""
        random = uniforms(self._keys(keys, 0), 3 + 2 * _ATTEMPTS)
        area = between(_AREA, random[:, 3 : 3 + _ATTEMPTS]) * height * width
        aspect = np.exp(between(_LOG_ASPECT, random[:, 3 + _ATTEMPTS :]))
        heights, widths = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (heights < height) & (widths < width)
        rows = np.flatnonzero((random[:, 0] < self._probability) & fits.any(axis=1))
        first = fits[rows].argmax(axis=1)
        tall, wide = heights[rows, first], widths[rows, first]
        tops = np.floor(random[rows, 1] * (height - tall + 1))
        lefts = np.floor(random[rows, 2] * (width - wide + 1))
        return _Boxes(rows, *(column.astype(np.int64) for column in (tops, lefts, tall, wide)))

    def _fill(self, images_BCHW: Tensor, boxes: _Boxes, keys: Ints) -> None:
        """Fills the pixels of all rectangles together; does not wait for the device."""
        counts = boxes.heights * boxes.widths
        starts = np.cumsum(counts) - counts
        table = np.stack([counts, starts, keys, boxes.rows, boxes.tops, boxes.lefts, boxes.widths])
        # One copy, small enough that the driver does not wait for the device.
        on_device = torch.from_numpy(table).to(images_BCHW.device, non_blocking=True)
        total = int(counts.sum())
        per_pixel = on_device[1:].repeat_interleave(on_device[0], dim=1, output_size=total)
        start, key, row, top, left, width = per_pixel.unbind()
        position = torch.arange(total, device=images_BCHW.device) - start
        y, x = top + position // width, left + position % width
        if self._mode == "const":
            images_BCHW[row, :, y, x] = 0.0
            return
        noise_position = position if self._mode == "pixel" else torch.zeros_like(position)
        images_BCHW[row, :, y, x] = normals(key, noise_position, images_BCHW.shape[1])


def normals(keys_N: Tensor, positions_N: Tensor, channels: int) -> Tensor:
    """Standard normal noise, float32[N, channels], a pure function of two columns of int64.

    The value is number position * channels + channel + 1 of the splitmix64 sequence of a key (see
    data/rng.py); its upper 24 bits become normal by the inverse distribution function.
    """
    channel = torch.arange(1, channels + 1, device=keys_N.device)[:, None]
    x = (positions_N * channels + channel).mul_(_signed(0x9E3779B97F4A7C15)).add_(keys_N)
    x = x.bitwise_xor_(_shifted(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x = x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(0x94D049BB133111EB))
    bits = _shifted(x.bitwise_xor_(_shifted(x, 31)), 40)
    # Odd multiples of 2**-24 between -1 and 1, all exact; the noise is at most 5.3.
    share = bits.mul_(2).add_(1 - (1 << 24)).float().mul_(2.0**-24)
    return share.erfinv_().mul_(math.sqrt(2)).T


def _signed(word: int) -> int:
    """The int64 with the same bits, since torch has no arithmetic on uint64."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of 64-bit words in int64; torch's own shift copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
