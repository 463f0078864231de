"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719) and other policies, on whole batches.

Rotations, shears and shifts are affine maps in Pillow's conventions: (a, b, c, d, e, f) maps the
position (x, y) in the output to (a x + b y + c, d x + e y + f) in the input, in pixels from the top
left corner, so centres of pixels are at halves.
"""

import re
from functools import partial

import numpy as np
from torch import Tensor

from trainyard.data.arrays import Floats, Ints
from trainyard.data.augment import kernels
from trainyard.data.augment.kernels import Fill, KernelCall, run, send
from trainyard.data.augment.policy import DrawnOperations, Policy, draw, parse_policy
from trainyard.data.batch import Keys

GEOMETRY = frozenset(
    {"Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY", "TranslateXRel", "TranslateYRel"}
)


class RandAugment:
    """Applies operations and strengths drawn for each sample by (seed, visit, id) alone.

    `policy` is in timm's notation, "rand-m9-mstd0.5-inc1" for instance, or "ta_wide", torchvision's
    TrivialAugmentWide. Differences from both: geometry is always bilinear, 0 bits of posterize give
    black (Pillow 13 refuses them), and unknown notation is an error.
    """

    def __init__(self, policy: str, *, seed: int, mean: tuple[float, ...]) -> None:
        """`mean`, from 0 to 1, fills pixels that geometry uncovers."""
        self._policy, self._seed = parse_policy(policy), seed
        red, green, blue = (min(255, round(255 * value)) for value in mean)
        self._fill = (0, 0, 0) if self._policy.is_black else (red, green, blue)

    def __call__(self, pixels_BCHW: Tensor, keys: Keys) -> Tensor:
        images_BHWC = pixels_BCHW.permute(0, 2, 3, 1).contiguous()
        draws = draw(self._policy, self._seed, keys.ids, keys.visits)
        size = (images_BHWC.shape[1], images_BHWC.shape[2])
        if self._policy.chains:
            self._mix(images_BHWC, draws, size)
        else:
            run(plan(self._policy, draws, size, self._fill), images_BHWC)
        return images_BHWC.permute(0, 3, 1, 2)

    def _mix(self, images_BHWC: Tensor, draws: DrawnOperations, size: tuple[int, int]) -> None:
        """Mixes chains of operations, and the mix with the images, in place."""
        chains = []
        for part in np.split(np.arange(self._policy.layers), self._policy.chains):
            own = DrawnOperations(draws.ops[:, part], draws.arguments[:, part], draws.shares)
            chains.append(images_BHWC.clone())
            run(plan(self._policy, own, size, self._fill), chains[-1])
        kernels.mix(
            images_BHWC, chains, *send([draws.shares.astype(np.float32)], images_BHWC.device)
        )


def plan(
    policy: Policy, draws: DrawnOperations, size: tuple[int, int], fill: Fill
) -> list[KernelCall]:
    """The calls of all layers, in order; `size` is (height, width)."""
    calls: list[KernelCall] = []
    plain = [re.sub("(Increasing|Original|Wide)$", "", name) for name in policy.ops]
    kinds = np.array([plain.index(name) for name in plain] + [-1])  # the last: no operation
    for layer in range(draws.ops.shape[1]):
        ops, arguments = kinds[draws.ops[:, layer]], draws.arguments[:, layer]
        maps = np.zeros((len(ops), 6))
        moved = np.zeros(len(ops), bool)
        for number, name in enumerate(plain):
            rows = np.flatnonzero(ops == number)
            if name in GEOMETRY:
                maps[rows], moved[rows] = affine_maps(name, arguments[rows], *size), True
            elif len(rows) and name != "Identity":
                calls.append(colour_call(name, rows, arguments[rows]))
        if moved.any():
            calls.append(warp_call(np.flatnonzero(moved), maps[moved], size, fill))
    return calls


def affine_maps(name: str, arguments: Floats, height: int, width: int) -> Floats:
    """The maps of an operation of GEOMETRY, float64[n, 6]."""
    maps = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (len(arguments), 1))
    match name:
        case "ShearX":
            maps[:, 1] = arguments
        case "ShearY":
            maps[:, 3] = arguments
        case "TranslateX":
            maps[:, 2] = arguments
        case "TranslateY":
            maps[:, 5] = arguments
        case "TranslateXRel":
            maps[:, 2] = arguments * width
        case "TranslateYRel":
            maps[:, 5] = arguments * height
        case _:  # as in Pillow's Image.rotate: anticlockwise about the middle, in degrees
            angle = -np.radians(arguments % 360.0)
            a, b = np.cos(angle).round(15), np.sin(angle).round(15)
            x, y = width / 2, height / 2
            maps = np.stack([a, b, x - a * x - b * y, -b, a, y + b * x - a * y], axis=1)
    return maps


def warp_call(rows: Ints, maps_n6: Floats, size: tuple[int, int], fill: Fill) -> KernelCall:
    """The kernel call of affine maps. A position is a part by column and one by row."""
    height, width = size
    x, y = np.arange(width) + 0.5, np.arange(height) + 0.5
    a, b, c, d, e, f = maps_n6.T[:, :, None]
    to_x, to_y = 2 / width, 2j / height  # from pixels
    by_column = (a * x + c) * to_x + (d * x + f) * to_y - (1 + 1j)
    by_row = b * y * to_x + e * y * to_y
    positions = (by_column.astype(np.complex64), by_row.astype(np.complex64))
    return KernelCall(partial(kernels.warp, fill=fill), rows, positions)


def colour_call(name: str, rows: Ints, arguments: Floats) -> KernelCall:
    """The kernel call of a colour operation."""
    match name:
        case "AutoContrast":
            return KernelCall(kernels.autocontrast, rows)
        case "Equalize":
            return KernelCall(kernels.equalize, rows)
        case "Invert" | "Solarize":  # an inversion's argument is 0
            return KernelCall(kernels.invert_from, rows, (arguments.astype(np.int16),))
        case "Posterize":
            bits = np.clip(arguments, 0, 8).astype(np.int64)
            return KernelCall(kernels.keep_bits, rows, ((0xFF00 >> bits & 0xFF).astype(np.uint8),))
        case "SolarizeAdd":
            return KernelCall(kernels.add_to_dark, rows, (arguments.astype(np.uint8),))
        case "GaussianBlur" | "GaussianBlurRand":
            return KernelCall(kernels.blur, rows, (box_weights(arguments),))
    factors = (arguments.astype(np.float32),)
    by_name = {
        "Brightness": kernels.brightness,
        "Contrast": kernels.contrast,
        "Color": kernels.saturation,
        "Desaturate": kernels.saturation,
        "Sharpness": kernels.sharpness,
    }
    return KernelCall(by_name[name], rows, factors)


def box_weights(sigmas: Floats) -> Floats:
    """Weights [n, 3] of a pixel, its neighbours and theirs in a box blur. Three such blurs in a
    row approximate a Gaussian of `sigmas` pixels, at most 2 (Gwosdek et al. 2011). In single
    precision and multiples of 2**-24, as in Pillow.
    """
    variance = sigmas.astype(np.float32) ** 2 / np.float32(3)
    whole = np.floor((np.sqrt(12 * variance + 1) - 1) / 2)  # 0 or 1: half of the box's length
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    part /= 6 * (variance - (whole + 1) ** 2)
    inner = np.floor(np.float32(2**24) / ((whole + part) * 2 + 1))
    outer = (2**24 - (2 * whole + 1).astype(np.int64) * inner.astype(np.int64)) // 2
    near, far = np.where(whole > 0, inner, outer), np.where(whole > 0, outer, 0)
    return np.stack([inner, near, far], axis=1) / 2.0**24
