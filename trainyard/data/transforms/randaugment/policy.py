"""Parses timm's notation of RandAugment. Needs neither torch nor timm."""

import math
import re
from dataclasses import dataclass

from trainyard.errors import RecipeError

# In timm's order, so that a draw picks the same operation in both.
_PLAIN = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd",
    "Color", "Contrast", "Brightness", "Sharpness",
    "ShearX", "ShearY", "TranslateXRel", "TranslateYRel",
)  # fmt: skip
_INCREASING = tuple(
    f"{name}Increasing"
    if name in {"Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness"}
    else name
    for name in _PLAIN
)
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

LEVELS = 10.0  # the magnitude at the end of an operation's usual range


@dataclass(frozen=True)
class Policy:
    ops: tuple[str, ...]
    magnitudes: tuple[float, ...]  # by operation, before noise
    weights: tuple[float, ...] | None = None
    """Weights of `ops` for draws without replacement; None: uniform draws with replacement."""
    layers: int = 2
    prob: float = 0.5
    noise: float = 0.0
    """Standard deviation of the magnitude; infinite: uniform from 0 to the magnitude."""
    limit: float = LEVELS
    """Magnitudes are clipped to [0, limit]."""


def parse_policy(text: str) -> Policy:
    """The policy of a text in timm's notation. ValueError if it is malformed."""
    try:
        return _parse(text)
    except ValueError as error:
        raise RecipeError(f"augment.randaugment: {error}") from None


def check_policy(text: str) -> str:
    """Returns `text`. ValueError if it is invalid; a validator for pydantic."""
    _parse(text)
    return text


def _parse(text: str) -> Policy:
    kind, *sections = text.split("-")
    if kind not in {"rand", "3a"}:
        raise ValueError(f'"{text}" is not known: write "rand-m9-mstd0.5-inc1", say, or "3a"')
    known = ("m", "n", "p", "mstd", "mmax", "inc", "t") if kind == "rand" else ("mstd",)
    values: dict[str, str] = {}
    for section in sections:
        # A name such as "mstd" in "mstd0.5" ends at the first digit; "t" takes a name: "tweights".
        split = re.fullmatch(r"(t)(\w+)|([a-z]+)([\d.]+)", section)
        key, value = [part for part in split.groups() if part] if split else (section, "")
        if key not in known or not value:
            raise ValueError(f'"{section}" in "{text}" is none of {", ".join(known)} and a value')
        if key in values:
            raise ValueError(f'"{key}" stands twice in "{text}"')
        values[key] = value
    noise = _number(values, "mstd", 0.0)
    noise = math.inf if noise > 100 else noise
    return _three_augment(noise) if kind == "3a" else _rand_augment(values, noise)


def _three_augment(noise: float) -> Policy:
    """3-Augment: always one of three (DeiT III, arXiv 2204.07118), with timm's magnitudes."""
    ops, magnitudes = ("Solarize", "Desaturate", "GaussianBlurRand"), (5.0, 10.0, 10.0)
    return Policy(ops, magnitudes, layers=1, prob=1.0, noise=noise)


def _rand_augment(values: dict[str, str], noise: float) -> Policy:
    table = values.get("t")
    weights = None
    if table is None:
        ops = _INCREASING if _whole(values, "inc", 0) else _PLAIN
    elif table == "3a":
        ops = _THREE
    elif table in _WEIGHTED:
        ops, weights = tuple(_WEIGHTED[table]), tuple(map(float, _WEIGHTED[table].values()))
    else:
        raise ValueError(f'"t{table}" is not known: tweights, t3a and t3aw are')
    policy = Policy(
        ops=ops,
        magnitudes=(float(_whole(values, "m", int(LEVELS))),) * len(ops),
        weights=weights,
        layers=_whole(values, "n", 2),
        prob=_number(values, "p", 0.5),
        noise=noise,
        limit=_whole(values, "mmax", 0) or LEVELS,
    )
    if policy.prob > 1:
        raise ValueError(f"p{policy.prob:g} is a probability, from 0 to 1")
    if not 1 <= policy.layers <= (100 if weights is None else len(ops)):
        most = "at most 100" if weights is None else f"at most the {len(ops)} weighted operations"
        raise ValueError(f"n{policy.layers} must be at least 1 and {most}")
    return policy


def _number(values: dict[str, str], key: str, default: float) -> float:
    text = values.get(key)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f'"{key}{text}" needs one number') from None


def _whole(values: dict[str, str], key: str, default: int) -> int:
    text = values.get(key)
    if text is not None and not text.isdecimal():
        raise ValueError(f'"{key}{text}" needs a whole number')
    return default if text is None else int(text)
