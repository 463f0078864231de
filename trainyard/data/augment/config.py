"""The [augment] section of a recipe."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from trainyard.data.augment.policy import check_policy
from trainyard.errors import RecipeError
from trainyard.section import Section


def _rising(limits: tuple[float, float]) -> tuple[float, float]:
    if not 0 < limits[0] <= limits[1]:
        raise ValueError("write the smaller number first; both are above 0")
    return limits


Range = Annotated[tuple[float, float], AfterValidator(_rising)]
Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentConfig(Section):
    NEEDS = (
        ("erasing_mode", "erasing"),
        ("mix_mode", "mixup", "cutmix"),
        ("mix_prob", "mixup", "cutmix"),
        ("switch_prob", "mixup"),
        ("switch_prob", "cutmix"),
    )

    scale: Range = (0.08, 1.0)
    """Smallest and largest share of the image's area that a training crop covers."""
    ratio: Range = (3 / 4, 4 / 3)
    """Smallest and largest width over height of a training crop."""
    flip: Probability = 0.5
    """Probability of a horizontal flip; 0 for digits or text."""
    flip_mode: Literal["random", "alternating"] = "random"
    """Draw each flip anew, or flip an image in every other epoch, starting at random: half of all
    visits, so `flip` stays 0.5."""
    translate: int = Field(0, ge=0)
    """Pixels by which images move at random, up and down, left and right, after the crop; borders
    are filled by reflection. 4 is usual for CIFAR."""
    randaugment: Annotated[str, AfterValidator(check_policy)] | None = None
    """A policy of colours and shapes, by timm's names: RandAugment such as "rand-m9-mstd0.5-inc1",
    "3a" (DeiT III), AutoAugment ("original", "originalr", "v0", "v0r"), AugMix without its loss
    such as "augmix-m3-w3"; or "ta_wide", torchvision's TrivialAugment."""
    color_jitter: tuple[Probability, ...] = ()
    """Strengths of brightness, contrast, saturation and optionally hue (0.5 at most). Works with
    `randaugment` "3a" or without `randaugment`."""
    erasing: Probability = 0.0
    """Probability of erasing a rectangle of an image."""
    erasing_mode: Literal["pixel", "rand", "const"] = "pixel"
    """Content of the rectangle: noise per pixel, one random colour, or zero."""
    mixup: float = Field(0.0, ge=0)
    """Alpha of mixup, whose shares are drawn from Beta(alpha, alpha); 0 for none."""
    cutmix: float = Field(0.0, ge=0)
    """Alpha of CutMix; 0 for none."""
    mix_prob: Probability = 1.0
    """Probability that mixup or CutMix is applied."""
    switch_prob: Probability = 0.5
    """Probability of CutMix where both are set."""
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    """Scope of one random draw: the whole batch, a pair of samples, or one sample."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread evenly over all classes."""
    extra: str | None = None
    """A function of your own for training batches after all other transforms, as "module:function"
    in the working directory."""

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @field_validator("flip_mode")
    @classmethod
    def _flips_half(cls, mode: str, others: ValidationInfo) -> str:
        flip = others.data.get("flip")
        if mode == "alternating" and flip != 0.5:
            raise ValueError(f"flips half of all visits: leave out augment.flip = {flip}")
        return mode

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

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        """Colours of images that have other channels."""
        settings = {
            f"augment.randaugment = {self.randaugment!r}": self.randaugment,
            f"augment.color_jitter = {list(self.color_jitter)}": self.color_jitter,
        }
        for setting, is_made in settings.items():
            if is_made and recipe.data.channels != 3:
                channels = recipe.data.channels
                yield RecipeError("recipe.needs-rgb", setting=setting, channels=channels)
