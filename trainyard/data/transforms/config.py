"""The [augment] section of a recipe."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from trainyard.data.transforms.randaugment.policy import check_policy
from trainyard.section import Section


def _rising(limits: tuple[float, float]) -> tuple[float, float]:
    if not 0 < limits[0] <= limits[1]:
        raise ValueError("write the smaller number first; both are above 0")
    return limits


Range = Annotated[tuple[float, float], AfterValidator(_rising)]
Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentConfig(Section):
    scale: Range = (0.08, 1.0)
    """Share of the image's area that a training crop covers, from and to."""
    ratio: Range = (3 / 4, 4 / 3)
    """Width over height of a training crop, from and to."""
    flip: Probability = 0.5
    """Probability of mirroring left to right; 0 for digits or text."""
    randaugment: Annotated[str, AfterValidator(check_policy)] | None = None
    """RandAugment in timm's notation, "rand-m9-mstd0.5-inc1" say, or "3a" (DeiT III)."""
    color_jitter: tuple[Probability, ...] = ()
    """Strengths of brightness, contrast, saturation and, if four, hue (0.5 at most); beside the
    randaugment "3a", or without."""
    erasing: Probability = 0.0
    """Probability of erasing a rectangle of an image."""
    erasing_mode: Literal["pixel", "rand", "const"] = "pixel"
    """What fills it: noise for each pixel, one random colour, or zero."""
    mixup: float = Field(0.0, ge=0)
    """Alpha of mixup: shares are drawn from Beta(alpha, alpha); 0 for none."""
    cutmix: float = Field(0.0, ge=0)
    """Alpha of CutMix; 0 for none."""
    mix_prob: Probability = 1.0
    """Probability of mixing at all, with mixup or CutMix."""
    switch_prob: Probability = 0.5
    """Where there are both, probability of CutMix."""
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    """What shares one draw: the batch, a pair of samples, or nothing."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target spread evenly over all classes."""

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @field_validator("color_jitter")
    @classmethod
    def _is_used(cls, strengths: tuple[float, ...], others: ValidationInfo) -> tuple[float, ...]:
        if len(strengths) not in (0, 3, 4):
            raise ValueError("write three strengths, or four with hue")
        if strengths[3:] > (0.5,):
            raise ValueError("hue is 0.5 at most, half of the circle")
        randaugment = others.data.get("randaugment")
        if strengths and randaugment and "3a" not in randaugment:
            raise ValueError(
                f'augment.randaugment = "{randaugment}" changes colours already: leave one out'
            )
        return strengths
