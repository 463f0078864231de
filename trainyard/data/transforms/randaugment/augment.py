"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719) in timm's variants, on whole batches."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainyard.data.batch import Keys
from trainyard.data.transforms.randaugment import colours, geometry
from trainyard.data.transforms.randaugment.draws import DrawnOperations, draw
from trainyard.data.transforms.randaugment.jobs import KernelCall, run
from trainyard.data.transforms.randaugment.policy import Policy, parse_policy


class RandAugment:
    """Applies operations and strengths drawn for each sample by (seed, visit, id) alone.

    `policy` is in timm's notation, "rand-m9-mstd0.5-inc1" for instance, or "3a". Differences from
    timm where timm fails or is silent: 0 bits of posterize give black (Pillow 13 refuses them), and
    unknown notation is an error.
    """

    def __init__(
        self,
        policy: str,
        *,
        seed: int,
        mean: tuple[float, ...],
        interpolation: Literal["bilinear", "bicubic"] | None = None,
    ) -> None:
        """`mean`, from 0 to 1, fills pixels that geometry uncovers. `interpolation`: of geometry;
        None draws it for each operation, as timm does by default.
        """
        self._policy, self._seed = parse_policy(policy), seed
        red, green, blue = (min(255, round(255 * value)) for value in mean)
        self._fill = (red, green, blue)
        self._interpolation = interpolation

    def __call__(self, pixels_BCHW: Tensor, keys: Keys) -> Tensor:
        images_BHWC = pixels_BCHW.permute(0, 2, 3, 1).contiguous()
        draws = draw(self._policy, self._seed, keys.ids, keys.epochs)
        if self._interpolation:
            draws = draws._replace(
                cubic=np.full_like(draws.cubic, self._interpolation == "bicubic")
            )
        jobs = plan(
            self._policy,
            draws,
            (images_BHWC.shape[1], images_BHWC.shape[2]),
            self._fill,
            split=images_BHWC.device.type == "cpu",
        )
        run(jobs, images_BHWC)
        return images_BHWC.permute(0, 3, 1, 2)


def plan(
    policy: Policy,
    draws: DrawnOperations,
    size: tuple[int, int],
    fill: geometry.Fill,
    *,
    split: bool,
) -> list[KernelCall]:
    """The jobs of all layers, in order; `size` is (height, width), `split` as in geometry."""
    jobs: list[KernelCall] = []
    for layer in range(policy.layers):
        ops, arguments = draws.ops[:, layer], draws.arguments[:, layer]
        moves = []
        for number, name in enumerate(policy.ops):
            rows = np.flatnonzero(ops == number)
            if name in geometry.NAMES:
                moves += [
                    geometry.Move(row, name, float(arguments[row]), bool(draws.cubic[row, layer]))
                    for row in rows.tolist()
                ]
            elif len(rows):
                jobs.append(colour_job(name.removesuffix("Increasing"), rows, arguments[rows]))
        jobs += geometry.geometry_jobs(moves, size, fill, split=split)
    return jobs


def colour_job(name: str, rows: NDArray[np.int64], arguments: NDArray[np.float64]) -> KernelCall:
    """The kernel call of a colour operation."""
    match name:
        case "AutoContrast":
            return KernelCall(colours.autocontrast, rows)
        case "Equalize":
            return KernelCall(colours.equalize, rows)
        case "Invert" | "Solarize":  # an inversion's argument is 0
            return KernelCall(colours.invert_from, rows, (arguments.astype(np.int16),))
        case "Posterize":
            bits = np.clip(arguments, 0, 8).astype(np.int64)
            return KernelCall(colours.keep_bits, rows, ((0xFF00 >> bits & 0xFF).astype(np.uint8),))
        case "SolarizeAdd":
            return KernelCall(colours.add_to_dark, rows, (arguments.astype(np.uint8),))
        case "GaussianBlur" | "GaussianBlurRand":
            return KernelCall(colours.blur, rows, (box_weights(arguments),))
    factors = (arguments.astype(np.float32),)
    kernels = {
        "Brightness": colours.brightness,
        "Contrast": colours.contrast,
        "Color": colours.saturation,
        "Desaturate": colours.saturation,
        "Sharpness": colours.sharpness,
    }
    return KernelCall(kernels[name], rows, factors)


def box_weights(sigmas: NDArray[np.float64]) -> NDArray[np.float64]:
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
