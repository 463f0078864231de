"""Random brightness, contrast, saturation and hue, on whole batches."""

import numpy as np
import torch
from torch import Tensor

from trainyard.data.arrays import Floats, Ints
from trainyard.data.augment import kernels
from trainyard.data.augment.kernels import KernelCall, run
from trainyard.data.batch import Keys
from trainyard.data.rng import JITTER, fold_in, uniforms

KINDS = ("brightness", "contrast", "saturation", "hue")


class ColorJitter:
    """torchvision's jitter: factors in [max(0, 1 - s), 1 + s], hue in [-s, s] turns, any order.

    Factors are uniform, and drawn for each sample by (seed, visit, id) alone.
    """

    def __init__(self, strengths: tuple[float, ...], *, seed: int) -> None:
        """`strengths`: of brightness, contrast, saturation and optionally hue (0.5 at most)."""
        self._strengths = np.array([*strengths, 0.0][:4])
        self._seed = seed

    def __call__(self, pixels_BCHW: Tensor, keys: Keys) -> Tensor:
        images_BHWC = pixels_BCHW.permute(0, 2, 3, 1).contiguous()
        run(self.plan(keys.ids, keys.visits), images_BHWC)
        return images_BHWC.permute(0, 3, 1, 2)

    def draw(self, ids: Ints, visits: Ints) -> tuple[Ints, Floats]:
        """Orders, first `KINDS[order[:, 0]]`, then ..., and factors by kind; each [B, 4]."""
        random = uniforms(fold_in(self._seed, np.full_like(ids, JITTER), visits, ids), 8)
        low = np.maximum(0.0, 1 - self._strengths)
        high = 1 + self._strengths
        low[3], high[3] = -self._strengths[3], self._strengths[3]
        return np.argsort(random[:, :4], axis=1), low + (high - low) * random[:, 4:]

    def plan(self, ids: Ints, visits: Ints) -> list[KernelCall]:
        orders, factors = self.draw(ids, visits)
        calls = []
        for turn in range(4):
            for kind in np.flatnonzero(self._strengths).tolist():
                rows = np.flatnonzero(orders[:, turn] == kind)
                if len(rows):
                    calls.append(_call(KINDS[kind], rows, factors[rows, kind]))
        return calls


def _call(kind: str, rows: Ints, factors: Floats) -> KernelCall:
    if kind == "hue":  # in 1/255 turn, modulo 256, as in torchvision
        return KernelCall(hue, rows, (np.trunc(factors * 255).astype(np.int16),))
    by_name = {
        "brightness": kernels.brightness,
        "contrast": kernels.contrast,
        "saturation": kernels.saturation,
    }
    return KernelCall(by_name[kind], rows, (factors.astype(np.float32),))


def hue(images_nHWC: Tensor, turn: Tensor) -> Tensor:
    """Converts to HSV in uint8 as Pillow does, adds `turn` (int16[n]) to the hue, and back: a
    kernel as in kernels.py.
    """
    red, green, blue = (images_nHWC[..., channel].float() for channel in range(3))
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    divisor = chroma.clamp(min=1)
    from_red, from_green, from_blue = (((value - c) / divisor).double() for c in (red, green, blue))
    sector = torch.where(
        red == value,
        from_blue - from_green,
        torch.where(green == value, 2 + from_red - from_blue, 4 + from_green - from_red),
    )
    # Pillow's changes between single and double precision; truncation shows any difference.
    turned = ((sector.float().double() / 6 + 1) % 1).float()
    turned = (turned.double() * 255).short() * (chroma > 0)
    turned = (turned + turn.view(-1, 1, 1)) & 255
    share = ((chroma / value.clamp(min=1)).double() * 255).floor_().float() / 255
    sixths = turned.float() * 6 / 255
    sixth = sixths.floor()
    part = sixths - sixth
    low = (value * (1 - share) + 0.5).floor_()
    falling = (value * (1 - share * part) + 0.5).floor_()
    rising = (value * (1 - share * (1 - part)) + 0.5).floor_()
    sixth = sixth.long() % 6
    # Red by sixths of the circle; green and blue follow two and four sixths later.
    course = torch.stack([value, falling, low, low, rising, value], dim=-1)
    for channel in range(3):
        index = ((sixth - 2 * channel) % 6).unsqueeze(-1)
        images_nHWC[..., channel] = course.gather(-1, index).squeeze(-1)
    return images_nHWC
