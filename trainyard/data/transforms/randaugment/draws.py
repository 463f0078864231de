"""Draws the operations of each sample and their strengths: on the host, keyed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.rng import fold_in, uniforms
from trainyard.data.transforms.randaugment.policy import LEVELS, Policy

STREAM = 5  # keeps these draws independent of other uses of the same seed
_PER_LAYER = 6  # random numbers per operation: choice, chance, noise (two), sign, detail

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class DrawnOperations(NamedTuple):
    """Drawn operations; each array is [B, layers]."""

    ops: NDArray[np.int64]  # index into Policy.ops, or -1 for none
    arguments: Floats  # an operation's degrees, factor, threshold, ...; see ARGUMENTS
    cubic: Bools  # True for bicubic geometry, False for bilinear


def draw(
    policy: Policy, seed: int, ids: NDArray[np.int64], visits: NDArray[np.int64]
) -> DrawnOperations:
    """Draws from timm's distributions: see RandAugment and AugmentOp in timm.data.auto_augment."""
    keys = fold_in(seed, np.full_like(ids, STREAM), visits, ids)
    random = uniforms(keys, _PER_LAYER * policy.layers + len(policy.ops))
    layers = random[:, : _PER_LAYER * policy.layers].reshape(len(ids), policy.layers, _PER_LAYER)
    choice, chance, noise, angle, sign, detail = np.moveaxis(layers, 2, 0)
    ops = (choice * len(policy.ops)).astype(np.int64)
    if policy.weights is not None:
        # The smallest of exponential variables at these rates give draws without replacement.
        waits = -np.log1p(-random[:, _PER_LAYER * policy.layers :]) / np.array(policy.weights)
        ops = np.argsort(waits, axis=1)[:, : policy.layers]
    levels = _levels(policy, np.array(policy.magnitudes)[ops], noise, angle)
    arguments = np.zeros_like(levels)
    for number, name in enumerate(policy.ops):
        here = ops == number
        arguments[here] = ARGUMENTS[name](levels[here], sign[here] > 0.5, detail[here])
    return DrawnOperations(np.where(chance <= policy.prob, ops, -1), arguments, detail < 0.5)


def _levels(policy: Policy, magnitudes: Floats, noise: Floats, angle: Floats) -> Floats:
    if policy.noise == np.inf:
        magnitudes = magnitudes * noise
    elif policy.noise > 0:  # normal, by Box and Muller
        normal = np.sqrt(-2 * np.log1p(-noise)) * np.cos(2 * np.pi * angle)
        magnitudes = magnitudes + policy.noise * normal
    return np.clip(magnitudes, 0.0, policy.limit)


# --- from a level, usually at most 10, to an operation's argument, as in timm ---


def _none(level: Floats, negative: Bools, detail: Floats) -> Floats:
    return np.zeros_like(level)


def _signed(most: float) -> Callable[[Floats, Bools, Floats], Floats]:
    def argument(level: Floats, negative: Bools, detail: Floats) -> Floats:
        size = (level / LEVELS) * most
        return np.where(negative, -size, size)

    return argument


def _factor(level: Floats, negative: Bools, detail: Floats) -> Floats:
    return (level / LEVELS) * 1.8 + 0.1


def _increasing_factor(level: Floats, negative: Bools, detail: Floats) -> Floats:
    return np.maximum(0.1, 1.0 + _signed(0.9)(level, negative, detail))


def _whole(most: int, limit: float = np.inf) -> Callable[[Floats, Bools, Floats], Floats]:
    def argument(level: Floats, negative: Bools, detail: Floats) -> Floats:
        return np.minimum(limit, np.floor((level / LEVELS) * most))

    return argument


def _less(start: int, most: int, limit: float) -> Callable[[Floats, Bools, Floats], Floats]:
    def argument(level: Floats, negative: Bools, detail: Floats) -> Floats:
        return start - _whole(most, limit)(level, negative, detail)

    return argument


def _between(low: float, high: float) -> Callable[[Floats, Bools, Floats], Floats]:
    def argument(level: Floats, negative: Bools, detail: Floats) -> Floats:
        return np.clip(low + (high - low) * (level / LEVELS), low, high)

    return argument


def _colour_share(level: Floats, negative: Bools, detail: Floats) -> Floats:
    return np.clip(1.0 - _between(0.5, 1.0)(level, negative, detail), 0.0, 1.0)


def _random_radius(level: Floats, negative: Bools, detail: Floats) -> Floats:
    return 0.1 + (2.0 * _between(0.0, 1.0)(level, negative, detail) - 0.1) * detail


ARGUMENTS: dict[str, Callable[[Floats, Bools, Floats], Floats]] = {
    "AutoContrast": _none,
    "Equalize": _none,
    "Invert": _none,
    "Rotate": _signed(30.0),  # degrees, anticlockwise
    "Posterize": _whole(4),  # bits to keep
    "PosterizeIncreasing": _less(4, 4, np.inf),
    "Solarize": _whole(256, 256),  # levels from this one on are inverted
    "SolarizeIncreasing": _less(256, 256, 256),
    "SolarizeAdd": _whole(110, 128),  # added to grey levels below 128
    "Color": _factor,  # 0 grey, 1 unchanged
    "ColorIncreasing": _increasing_factor,
    "Contrast": _factor,
    "ContrastIncreasing": _increasing_factor,
    "Brightness": _factor,
    "BrightnessIncreasing": _increasing_factor,
    "Sharpness": _factor,
    "SharpnessIncreasing": _increasing_factor,
    "ShearX": _signed(0.3),
    "ShearY": _signed(0.3),
    "TranslateXRel": _signed(0.45),  # of the width
    "TranslateYRel": _signed(0.45),  # of the height
    "Desaturate": _colour_share,  # Color's factor
    "GaussianBlur": _between(0.1, 2.0),  # standard deviation, pixels
    "GaussianBlurRand": _random_radius,
}
