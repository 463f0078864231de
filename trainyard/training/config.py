"""The [loss] section of a recipe."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from trainyard.errors import RecipeError
from trainyard.section import Section, refused

Weight = Annotated[float, Field(ge=0)]


class LossConfig(Section):
    TAKEN_BY: ClassVar = {
        "bce_threshold": ("bce",),
        "bce_sum": ("bce",),
        "focal_gamma": ("focal",),
        "class_weights": ("ce", "focal"),
    }

    name: Literal["ce", "bce", "focal"] = "ce"
    """Cross-entropy over all classes, binary cross-entropy of each class, or the focal loss:
    cross-entropy that counts well recognised samples less. Lists of labels need bce."""
    bce_threshold: float | None = Field(None, ge=0, lt=1)
    """With bce: targets above this become 1 and others 0; targets are unchanged if not set."""
    bce_sum: bool = False
    """With bce: sum over classes instead of the mean."""
    focal_gamma: float = Field(2.0, ge=0)
    """With focal: each class's term has the factor (1 - p)^gamma, p its probability; 0 is
    cross-entropy."""
    class_weights: str | Annotated[tuple[Weight, ...], Field(min_length=1)] | None = None
    """With ce or focal: weight of each class in the loss. "balanced": N / (C n) for a class with n
    of the N training samples of C classes, so the mean over samples is 1. Or a number for each
    class in the order of their names, as a list, or as a text file with one in each line."""
    teacher: str | None = None
    """Model to distil from: a run (its best checkpoint), a checkpoint, the name of a timm model for
    its pretrained weights, or a file of weights. The teacher sees the same images as the model,
    mixed ones too."""
    teacher_model: str | None = None
    """Name of the timm model whose weights are in the file `teacher`."""
    distillation: Literal["soft", "hard"] = "soft"
    """Target from the teacher: its probabilities (soft) or its top class (hard)."""
    distillation_share: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher's term in the loss."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of soft distillation."""

    @field_validator("teacher_model", "distillation", "distillation_share", "temperature")
    @classmethod
    def _has_teacher(cls, value: Any, others: ValidationInfo) -> Any:
        if value == cls.model_fields[str(others.field_name)].default:
            return value
        if others.data.get("teacher") is None:
            raise ValueError("needs loss.teacher")
        if others.field_name == "temperature" and others.data.get("distillation") == "hard":
            raise ValueError('needs loss.distillation = "soft"')
        return value

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        if recipe.data.order == "join":
            setting, is_made = "loss.class_weights = 'balanced'", self.class_weights == "balanced"
            other = "data.order = 'join', which does not count the classes"
            yield from refused({setting: is_made}, other, "write a number for each class")
