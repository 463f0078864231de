"""Policies by the names that timm and torchvision give them, and what they draw for a sample.

Draws are keyed, and made on the host. Needs neither torch nor timm.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainyard.data.arrays import Bools, Floats, Ints
from trainyard.data.rng import POLICIES, fold_in, uniforms

_PER_LAYER = 6  # random numbers per operation: choice, chance, noise (two), sign, detail


# In timm's order, so that a draw picks the same operation in both.
_PLAIN = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd",
    "Color", "Contrast", "Brightness", "Sharpness",
    "ShearX", "ShearY", "TranslateXRel", "TranslateYRel",
)  # fmt: skip
_RISING = {"Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness"}
_INCREASING = tuple(f"{name}Increasing" if name in _RISING else name for name in _PLAIN)
_THREE = ("SolarizeIncreasing", "Desaturate", "GaussianBlur")
_WEIGHTED: dict[str, dict[str, float]] = {
    "weights": {
        "Rotate": 3, "ShearX": 2, "ShearY": 2, "TranslateXRel": 1, "TranslateYRel": 1,
        "ColorIncreasing": 0.25, "SharpnessIncreasing": 0.25, "AutoContrast": 0.25,
        "SolarizeIncreasing": 0.05, "SolarizeAdd": 0.05, "ContrastIncreasing": 0.05,
        "BrightnessIncreasing": 0.05, "Equalize": 0.05, "PosterizeIncreasing": 0.05,
        "Invert": 0.05,
    },
    "3aw": {
        "SolarizeIncreasing": 6, "Desaturate": 6, "GaussianBlur": 6, "Rotate": 3, "ShearX": 2,
        "ShearY": 2, "PosterizeIncreasing": 1, "AutoContrast": 1, "ColorIncreasing": 1,
        "SharpnessIncreasing": 1, "ContrastIncreasing": 1, "BrightnessIncreasing": 1,
        "Equalize": 1, "Invert": 1,
    },
}  # fmt: skip

# AutoAugment (Cubuk et al. 2018, arXiv 1805.09501) for ImageNet: pairs of an operation, its
# probability and its magnitude, in tenths each.
_ORIGINAL = """
PosterizeOriginal 4 8 Rotate 6 9, Solarize 6 5 AutoContrast 6 5, Equalize 8 8 Equalize 6 3,
PosterizeOriginal 6 7 PosterizeOriginal 6 6, Equalize 4 7 Solarize 2 4, Equalize 4 4 Rotate 8 8,
Solarize 6 3 Equalize 6 7, PosterizeOriginal 8 5 Equalize 10 2, Rotate 2 3 Solarize 6 8,
Equalize 6 8 PosterizeOriginal 4 6, Rotate 8 8 Color 4 0, Rotate 4 9 Equalize 6 2,
Equalize 0 7 Equalize 8 8, Invert 6 4 Equalize 10 8, Color 6 4 Contrast 10 8,
Rotate 8 8 Color 10 2, Color 8 8 Solarize 8 7, Sharpness 4 7 Invert 6 8,
ShearX 6 5 Equalize 10 9, Color 4 0 Equalize 6 3, Equalize 4 7 Solarize 2 4,
Solarize 6 5 AutoContrast 6 5, Invert 6 4 Equalize 10 8, Color 6 4 Contrast 10 8,
Equalize 8 8 Equalize 6 3"""
# That of the TPU implementation of EfficientNet.
_V0 = """
Equalize 8 1 ShearY 8 4, Color 4 9 Equalize 6 3, Color 4 1 Rotate 6 8, Solarize 8 3 Equalize 4 7,
Solarize 4 2 Solarize 6 2, Color 2 0 Equalize 8 8, Equalize 4 8 SolarizeAdd 8 3,
ShearX 2 9 Rotate 6 8, Color 6 1 Equalize 10 2, Invert 4 9 Rotate 6 0, Equalize 10 9 ShearY 6 3,
Color 4 7 Equalize 6 0, Posterize 4 6 AutoContrast 4 7, Solarize 6 8 Color 6 9,
Solarize 2 4 Rotate 8 9, Rotate 10 7 TranslateYRel 8 9, ShearX 0 0 Solarize 8 4,
ShearY 8 0 Color 6 4, Color 10 0 Rotate 6 2, Equalize 8 4 Equalize 0 8,
Equalize 10 4 AutoContrast 6 2, ShearY 4 7 SolarizeAdd 6 7, Posterize 8 2 Solarize 6 10,
Solarize 6 8 Equalize 6 1, Color 8 6 Rotate 4 5"""
_AUTO = {
    "original": _ORIGINAL,
    "originalr": _ORIGINAL.replace("Original", "Increasing"),
    "v0": _V0,
    "v0r": _V0.replace("Posterize", "PosterizeIncreasing"),
}
_AUGMIX = (
    "AutoContrast", "ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing",
    "SharpnessIncreasing", "Equalize", "Rotate", "PosterizeIncreasing", "SolarizeIncreasing",
    "ShearX", "ShearY", "TranslateXRel", "TranslateYRel",
)  # fmt: skip
_WIDE = (
    "Identity", "ShearXWide", "ShearYWide", "TranslateXWide", "TranslateYWide", "RotateWide",
    "BrightnessWide", "ColorWide", "ContrastWide", "SharpnessWide", "PosterizeWide",
    "SolarizeWide", "AutoContrast", "Equalize",
)  # fmt: skip
_SECTIONS = {
    "rand": ("m", "n", "p", "mstd", "mmax", "inc", "t"),
    "augmix": ("m", "w", "d", "mstd"),
    "ta_wide": (),
} | dict.fromkeys(("3a", *_AUTO), ("mstd",))
_MOST_CHAINS = 10

LEVELS = 10.0  # the magnitude at the end of an operation's usual range


@dataclass(frozen=True)
class Policy:
    ops: tuple[str, ...]
    magnitudes: tuple[float, ...]  # by operation, before noise
    weights: tuple[float, ...] | None = None
    """Weights of `ops` for draws without replacement; None: uniform draws with replacement."""
    layers: int = 2
    prob: float | tuple[float, ...] = 0.5
    """Of every operation, or by operation."""
    noise: float = 0.0
    """Standard deviation of the magnitude; infinite: uniform from 0 to the magnitude."""
    limit: float = LEVELS
    """Magnitudes are clipped to [0, limit]."""
    pairs: bool = False
    """Draw two neighbours of `ops`, as AutoAugment does."""
    bins: int = 0
    """Draw one of so many magnitudes from 0 to LEVELS, as TrivialAugment does; 0: see `noise`."""
    chains: int = 0
    """Mix the results of so many chains of operations, as AugMix does; each has its share of the
    layers, or with `depths` from 1 to that."""
    depths: bool = False
    is_black: bool = False
    """Fill uncovered pixels with black."""


def check_policy(text: str) -> str:
    """Returns `text`. ValueError if it is invalid; a validator for pydantic."""
    parse_policy(text)
    return text


def parse_policy(text: str) -> Policy:
    """The policy of a text in timm's notation. ValueError if it is malformed."""
    kind, *sections = text.split("-")
    if kind not in _SECTIONS:
        names = ", ".join(f'"{name}"' for name in _SECTIONS if name not in ("rand", "augmix"))
        raise ValueError(
            f'"{text}" is not known: write "rand-m9-mstd0.5-inc1", "augmix-m3-w3", say, or {names}'
        )
    known, values = _SECTIONS[kind], dict[str, str]()
    for section in sections:
        # A name such as "mstd" in "mstd0.5" ends at the first digit; "t" takes a name: "tweights".
        split = re.fullmatch(r"(t)(\w+)|([a-z]+)([\d.]+)", section)
        key, value = [part for part in split.groups() if part] if split else (section, "")
        if key not in known or not value:
            allowed = f"none of {', '.join(known)} and a value" if known else "not known there"
            raise ValueError(f'"{section}" in "{text}" is {allowed}')
        if key in values:
            raise ValueError(f'"{key}" stands twice in "{text}"')
        values[key] = value
    noise = _number(values, "mstd", math.inf if kind == "augmix" else 0.0)
    noise = math.inf if noise > 100 and kind != "augmix" else noise
    if kind in _AUTO:
        return _auto_augment(_AUTO[kind], noise)
    if kind == "augmix":
        return _augmix(values, noise)
    if kind == "ta_wide":
        ones = (LEVELS,) * len(_WIDE)
        return Policy(_WIDE, ones, layers=1, prob=1.0, bins=31, is_black=True)
    return _three_augment(noise) if kind == "3a" else _rand_augment(values, noise)


def _auto_augment(table: str, noise: float) -> Policy:
    names, tenths, magnitudes = (table.replace(",", " ").split()[n::3] for n in range(3))
    chances = tuple(int(tenth) / 10 for tenth in tenths)
    levels = tuple(map(float, magnitudes))
    return Policy(tuple(names), levels, prob=chances, noise=noise, pairs=True)


def _augmix(values: dict[str, str], noise: float) -> Policy:
    """AugMix (Hendrycks et al. 2019, arXiv 1912.02781), without its loss, as timm has it."""
    chains, depth = _parse_int(values, "w", 3), _parse_int(values, "d", 0)
    if not (1 <= chains <= _MOST_CHAINS and depth <= _MOST_CHAINS):
        raise ValueError(f"w is from 1 to {_MOST_CHAINS}, and d at most {_MOST_CHAINS}")
    magnitudes = (float(_parse_int(values, "m", 3)),) * len(_AUGMIX)
    layers, depths = chains * (depth or 3), depth == 0
    return Policy(
        _AUGMIX, magnitudes, layers=layers, prob=1.0, noise=noise, chains=chains, depths=depths
    )


def _three_augment(noise: float) -> Policy:
    """3-Augment: always one of three (DeiT III, arXiv 2204.07118), with timm's magnitudes."""
    ops, magnitudes = ("Solarize", "Desaturate", "GaussianBlurRand"), (5.0, 10.0, 10.0)
    return Policy(ops, magnitudes, layers=1, prob=1.0, noise=noise)


def _rand_augment(values: dict[str, str], noise: float) -> Policy:
    table = values.get("t")
    weights = None
    if table is None:
        ops = _INCREASING if _parse_int(values, "inc", 0) else _PLAIN
    elif table == "3a":
        ops = _THREE
    elif table in _WEIGHTED:
        ops, weights = tuple(_WEIGHTED[table]), tuple(map(float, _WEIGHTED[table].values()))
    else:
        raise ValueError(f'"t{table}" is not known: tweights, t3a and t3aw are')
    policy = Policy(
        ops=ops,
        magnitudes=(float(_parse_int(values, "m", int(LEVELS))),) * len(ops),
        weights=weights,
        layers=_parse_int(values, "n", 2),
        prob=_number(values, "p", 0.5),
        noise=noise,
        limit=_parse_int(values, "mmax", 0) or LEVELS,
    )
    if _number(values, "p", 0.5) > 1:
        raise ValueError(f"p{values['p']} is a probability, from 0 to 1")
    if not 1 <= policy.layers <= (100 if weights is None else len(ops)):
        limit = "at most 100" if weights is None else f"at most the {len(ops)} weighted operations"
        raise ValueError(f"n{policy.layers} must be at least 1 and {limit}")
    return policy


def _number(values: dict[str, str], key: str, default: float) -> float:
    text = values.get(key)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f'"{key}{text}" needs one number') from None


def _parse_int(values: dict[str, str], key: str, default: int) -> int:
    text = values.get(key)
    if text is not None and not text.isdecimal():
        raise ValueError(f'"{key}{text}" needs a whole number')
    return default if text is None else int(text)


# --- draws ---


class DrawnOperations(NamedTuple):
    """Drawn operations; each array is [B, layers]."""

    ops: Ints  # index into Policy.ops, or -1 for none
    arguments: Floats  # an operation's degrees, factor, threshold, ...; see ARGUMENTS
    shares: Floats  # [B, 1 + chains]: of the mix in the result, and of each chain in the mix


def draw(policy: Policy, seed: int, ids: Ints, visits: Ints) -> DrawnOperations:
    """Draws from timm's distributions, and torchvision's of TrivialAugmentWide."""
    keys = fold_in(seed, np.full_like(ids, POLICIES), visits, ids)
    random = uniforms(keys, _PER_LAYER * policy.layers + len(policy.ops))
    layers = random[:, : _PER_LAYER * policy.layers].reshape(len(ids), policy.layers, _PER_LAYER)
    choice, chance, noise, angle, sign, detail = np.moveaxis(layers, 2, 0)
    ops = (choice * len(policy.ops)).astype(np.int64)
    if policy.weights is not None:
        # The smallest of exponential variables at these rates give draws without replacement.
        waits = -np.log1p(-random[:, _PER_LAYER * policy.layers :]) / np.array(policy.weights)
        ops = np.argsort(waits, axis=1)[:, : policy.layers]
    if policy.pairs:
        ops = 2 * (choice[:, :1] * (len(policy.ops) // 2)).astype(np.int64) + np.arange(2)
    levels = _levels(policy, np.array(policy.magnitudes)[ops], noise, angle)
    arguments = np.zeros_like(levels)
    for number, name in enumerate(policy.ops):
        of_kind = ops == number
        arguments[of_kind] = ARGUMENTS[name](levels[of_kind], sign[of_kind] > 0.5, detail[of_kind])
    kept = chance <= (policy.prob if isinstance(policy.prob, float) else np.array(policy.prob)[ops])
    shares = np.ones((len(ids), 1))
    if policy.chains:
        more = random[:, _PER_LAYER * policy.layers :]
        shares = _shares(more[:, : policy.chains], more[:, -1:])
        if policy.depths:
            depths = 1 + (more[:, -2:-1] * 3).astype(np.int64)
            kept &= np.arange(policy.layers) % 3 < depths
    return DrawnOperations(np.where(kept, ops, -1), arguments, shares)


def _shares(chains: Floats, mixed: Floats) -> Floats:
    """The share of the mix, from Beta(1, 1), then those of its chains, from Dirichlet(1)."""
    waits = -np.log1p(-chains)
    return np.concatenate([mixed, waits / waits.sum(axis=1, keepdims=True)], axis=1)


def _levels(policy: Policy, magnitudes: Floats, noise: Floats, angle: Floats) -> Floats:
    if policy.bins:
        return np.floor(noise * policy.bins) / (policy.bins - 1) * LEVELS
    if policy.noise == np.inf:
        magnitudes = magnitudes * noise
    elif policy.noise > 0:  # normal, by Box and Muller
        normal = np.sqrt(-2 * np.log1p(-noise)) * np.cos(2 * np.pi * angle)
        magnitudes = magnitudes + policy.noise * normal
    return np.clip(magnitudes, 0.0, policy.limit)


# --- from a level, usually at most 10, to an operation's argument, as in timm ---


Argument = Callable[[Floats, Bools, Floats], Floats]
"""Given the levels, whether they are negative, and one more number, from 0 to 1."""


def _none(level: Floats, *_: object) -> Floats:
    return np.zeros_like(level)


def _signed(top: float) -> Argument:
    return lambda level, negative, _: np.where(negative, -1.0, 1.0) * ((level / LEVELS) * top)


def _factor(level: Floats, *_: object) -> Floats:
    return (level / LEVELS) * 1.8 + 0.1


def _increasing_factor(*drawn: Any) -> Floats:
    return np.maximum(0.1, 1.0 + _signed(0.9)(*drawn))


def _floored(top: int, limit: float = np.inf) -> Argument:
    return lambda level, *_: np.minimum(limit, np.floor((level / LEVELS) * top))


def _floored_below(start: int, top: int, limit: float) -> Argument:
    return lambda *drawn: start - _floored(top, limit)(*drawn)


def _between(low: float, high: float) -> Argument:
    return lambda level, *_: np.clip(low + (high - low) * (level / LEVELS), low, high)


def _colour_share(*drawn: Any) -> Floats:
    return np.clip(1.0 - _between(0.5, 1.0)(*drawn), 0.0, 1.0)


def _random_radius(level: Floats, negative: Bools, detail: Floats) -> Floats:
    return 0.1 + (2.0 * _between(0.0, 1.0)(level, negative, detail) - 0.1) * detail


def _wide_factor(*drawn: Any) -> Floats:
    return 1.0 + _signed(0.99)(*drawn)


def _wide_bits(level: Floats, *_: object) -> Floats:
    return 8 - np.round(level / LEVELS * 6)


def _wide_threshold(level: Floats, *_: object) -> Floats:
    return np.ceil(np.round(255 * (1 - level / LEVELS), 6))


def _whole_pixels(level: Floats, negative: Bools, _: Floats) -> Floats:
    pixels = 32 - 32 * (1 - level / LEVELS) * (1 + 1e-7)  # in float32, in which 16 is below 16
    return np.where(negative, 1.0, -1.0) * np.trunc(pixels)


ARGUMENTS: dict[str, Argument] = {
    "Identity": _none,
    "AutoContrast": _none,
    "Equalize": _none,
    "Invert": _none,
    "Rotate": _signed(30.0),  # degrees, anticlockwise
    "Posterize": _floored(4),  # bits to keep
    "PosterizeIncreasing": _floored_below(4, 4, np.inf),
    "PosterizeOriginal": lambda *drawn: 4 + _floored(4)(*drawn),
    "PosterizeWide": _wide_bits,
    "Solarize": _floored(256, 256),  # levels from this one on are inverted
    "SolarizeIncreasing": _floored_below(256, 256, 256),
    "SolarizeAdd": _floored(110, 128),  # added to grey levels below 128
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
    "RotateWide": _signed(135.0),
    "SolarizeWide": _wide_threshold,
    "ColorWide": _wide_factor,
    "ContrastWide": _wide_factor,
    "BrightnessWide": _wide_factor,
    "SharpnessWide": _wide_factor,
    "ShearXWide": _signed(0.99),
    "ShearYWide": _signed(0.99),
    "TranslateXWide": _whole_pixels,
    "TranslateYWide": _whole_pixels,
    "Desaturate": _colour_share,  # Color's factor
    "GaussianBlur": _between(0.1, 2.0),  # standard deviation, pixels
    "GaussianBlurRand": _random_radius,
}
