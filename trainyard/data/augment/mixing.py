"""mixup and CutMix on the device, as in `timm.data.Mixup`.

mixup (Zhang et al. 2018) is a weighted mean of two images; CutMix (Yun et al. 2019) puts a
rectangle of one into the other. Targets are mixed in proportion to the visible parts. As in timm,
the partner of a sample is at the same position in the rank's batch in reverse order.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainyard.data.arrays import Floats, Ints
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.batch import Batch, Keys
from trainyard.data.rng import MIXING, UInt64s, fold_in, uniforms


class _Mixes(NamedTuple):
    """The mix inside a rectangle (for mixup, the whole image), and its result."""

    kept: Floats  # [n], share of the own image inside the rectangle: 0 for CutMix
    lam: Floats  # [n], share of the own label
    boxes: Ints  # [n, 4]: top, bottom, left, right


class Mixing:
    """Mixes with one draw for the rank's batch, for each pair of partners, or for each sample.

    The draw for a batch is keyed by (seed, position), so it is equal on every rank. That for a
    sample is keyed by (seed, visit, sample), that for a pair by its first sample. Samples with a
    bad partner are not mixed. Nothing waits for the device.
    """

    def __init__(self, config: AugmentConfig, *, seed: int) -> None:
        self._config, self._seed = config, seed

    def __call__(self, batch: Batch, keys: Keys) -> Batch:
        size = (batch.images_BCHW.shape[2], batch.images_BCHW.shape[3])
        alone = batch.weights.flip(0) == 0
        if self._config.mix_mode == "batch":
            key = fold_in(self._seed, np.array([MIXING]), np.array([keys.position]))
            lam = self._mix_alike(batch.images_BCHW, alone, self._draw(key, *size))
        else:
            lam = self._mix_each(batch.images_BCHW, alone, self._draw(self._each_key(keys), *size))
        return replace(
            batch,
            mixed_labels=torch.where(alone, batch.labels, batch.labels.flip(0)),
            lam=torch.where(alone, 1.0, lam),
        )

    def _each_key(self, keys: Keys) -> UInt64s:
        count = len(keys.ids)
        rows = np.arange(count)
        if self._config.mix_mode == "pair":
            rows = np.minimum(rows, count - 1 - rows)
        stream = np.full(count, MIXING)
        return fold_in(self._seed, stream, keys.visits[rows], keys.ids[rows])

    def _draw(self, keys: UInt64s, height: int, width: int) -> _Mixes:
        config, random = self._config, uniforms(keys, 6)
        is_cut = random[:, 1] < (config.switch_prob if config.mixup else 1)
        is_cut &= config.cutmix > 0
        alpha = np.where(is_cut, config.cutmix, config.mixup)
        lam = symmetric_beta(alpha, random[:, 2], random[:, 3])
        lam = np.where(random[:, 0] < config.mix_prob, lam, 1.0)
        side = np.sqrt(1 - lam)
        top, bottom = _extent(height, side, random[:, 4])
        left, right = _extent(width, side, random[:, 5])
        boxes = np.stack([top, bottom, left, right], axis=1)
        boxes[~is_cut] = 0, height, 0, width
        seen = 1 - (bottom - top) * (right - left) / (height * width)  # the image's edge cuts boxes
        return _Mixes(np.where(is_cut, 0, lam), np.where(is_cut, seen, lam), boxes)

    def _mix_alike(self, images_BCHW: Tensor, alone: Tensor, mixes: _Mixes) -> Tensor:
        top, bottom, left, right = mixes.boxes[0].tolist()
        kept = torch.where(alone, 1.0, float(mixes.kept[0]))
        if mixes.lam[0] < 1:
            _blend(images_BCHW[:, :, top:bottom, left:right], kept.view(-1, 1, 1, 1))
        return torch.full_like(kept, float(mixes.lam[0]))

    def _mix_each(self, images_BCHW: Tensor, alone: Tensor, mixes: _Mixes) -> Tensor:
        table = np.concatenate([mixes.kept[None], mixes.lam[None], mixes.boxes.T])
        # One copy, small enough that the driver does not wait for the device.
        on_device = torch.from_numpy(table.astype(np.float32)).to(alone.device, non_blocking=True)
        kept, lam, top, bottom, left, right = on_device[:, :, None, None, None].unbind()
        height, width = images_BCHW.shape[2:]
        y = torch.arange(height, device=alone.device)[:, None]
        x = torch.arange(width, device=alone.device)
        inside_B1HW = (y >= top) & (y < bottom) & (x >= left) & (x < right)
        inside_B1HW &= ~alone.view(-1, 1, 1, 1)
        _blend(images_BCHW, torch.where(inside_B1HW, kept, 1.0))
        return lam.view(-1)


def _blend(images_BCHW: Tensor, share: Tensor) -> None:
    """Blends each image in place with its partner, whose share is 1 - `share`."""
    partners_BCHW = images_BCHW.flip(0).mul_(1 - share)
    images_BCHW.mul_(share).add_(partners_BCHW)


def _extent(length: int, share: Floats, random: Floats) -> tuple[Ints, Ints]:
    """Start and end of intervals of `share` of `length`, clipped at the ends."""
    size = (length * share).astype(np.int64)
    centre = (length * random).astype(np.int64)
    return np.maximum(centre - size // 2, 0), np.minimum(centre + (size + 1) // 2, length)


def symmetric_beta(alpha: Floats, radius: Floats, angle: Floats) -> Floats:
    """Draws from Beta(alpha, alpha), for any alpha > 0, from two uniform numbers each.

    Bailey's t / sqrt(2 alpha) = sqrt(u**(-1 / alpha) - 1) cos(2 pi v) has Student's distribution
    with 2 alpha degrees of freedom, and the draw is (1 + t / sqrt(2 alpha + t**2)) / 2 (Devroye
    1996, "Random variate generation in one line of code"); written without quotients that overflow.
    """
    power = radius ** (1 / alpha)
    cosine = np.cos(2 * np.pi * angle)
    share = cosine * np.sqrt((1 - power) / (power + (1 - power) * cosine**2))
    lam: Floats = np.clip((1 + share) / 2, 0, 1)  # exceeded only by rounding
    return lam
