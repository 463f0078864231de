"""Losses per sample of a micro-batch; the step takes their weighted mean."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from trainyard.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.training.step import Loss, MicroBatch

    Teacher = Callable[[Tensor], Tensor]  # images[B, C, H, W] to float32 logits[B, classes]


class LossConfig(Section):
    name: Literal["ce", "bce"] = "ce"
    """Cross-entropy over all classes, or binary cross-entropy of each class."""
    bce_threshold: float | None = Field(None, ge=0, lt=1)
    """With bce: targets above this become 1 and others 0; targets are unchanged if not set."""
    bce_sum: bool = False
    """With bce: sum over classes instead of the mean."""
    teacher: str | None = None
    """Run (its best checkpoint) or checkpoint to distil from. The teacher sees the same images as
    the model, mixed ones too."""
    distillation: Literal["soft", "hard"] = "soft"
    """Target from the teacher: its probabilities (soft) or its top class (hard)."""
    distillation_share: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher's term in the loss."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of soft distillation."""

    @field_validator("bce_threshold", "bce_sum")
    @classmethod
    def _has_bce(cls, value: float | None, others: ValidationInfo) -> float | None:
        if value is not None and value is not False and others.data.get("name") == "ce":
            raise ValueError('needs loss.name = "bce"')
        return value

    @field_validator("distillation", "distillation_share", "temperature")
    @classmethod
    def _has_teacher(cls, value: Any, others: ValidationInfo) -> Any:
        if value == cls.model_fields[str(others.field_name)].default:
            return value
        if others.data.get("teacher") is None:
            raise ValueError("needs loss.teacher, a run or a checkpoint")
        if others.field_name == "temperature" and others.data.get("distillation") == "hard":
            raise ValueError('needs loss.distillation = "soft"')
        return value


def build_loss(
    config: LossConfig, smoothing: float, *, teacher: "Teacher | None", mixes: bool = True
) -> "Loss":
    """A function from float32 logits[B, C] and their micro-batch to losses[B].

    `smoothing` spreads part of the targets over all classes, for bce too, as in timm. If `mixes`
    is false, mixed labels are ignored, and cross-entropy is torch's own.
    """
    build = _cross_entropy if config.name == "ce" else partial(_binary_cross_entropy, config)
    loss = build(smoothing, mixes)
    return loss if teacher is None else _distilled(config, loss, teacher)


def _cross_entropy(smoothing: float, mixes: bool) -> "Loss":
    """Cross-entropy with mixed, smoothed targets (timm's SoftTargetCrossEntropy), never dense."""
    from torch.nn import functional as F

    def plain(logits: "Tensor", batch: "MicroBatch") -> "Tensor":
        return F.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=smoothing)

    def mixed(logits: "Tensor", batch: "MicroBatch") -> "Tensor":
        log_probabilities = F.log_softmax(logits, dim=1)
        own = F.nll_loss(log_probabilities, batch.labels, reduction="none")
        other = F.nll_loss(log_probabilities, batch.mixed_labels, reduction="none")
        losses = batch.lam * own + (1 - batch.lam) * other
        if smoothing:
            losses = (1 - smoothing) * losses - smoothing * log_probabilities.mean(dim=1)
        return losses

    return mixed if mixes else plain


def _binary_cross_entropy(config: LossConfig, smoothing: float, mixes: bool) -> "Loss":
    """A binary loss per class (Wightman et al. 2021), as timm's BinaryCrossEntropy."""
    import torch
    from torch.nn import functional as F

    def losses_of(logits: "Tensor", batch: "MicroBatch") -> "Tensor":
        targets = torch.zeros_like(logits)
        if mixes:
            targets.scatter_add_(1, batch.labels[:, None], batch.lam[:, None])
            targets.scatter_add_(1, batch.mixed_labels[:, None], 1 - batch.lam[:, None])
        else:
            targets.scatter_(1, batch.labels[:, None], 1.0)
        targets.mul_(1 - smoothing).add_(smoothing / logits.shape[1])
        if config.bce_threshold is not None:
            targets = (targets > config.bce_threshold).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses.sum(dim=1) if config.bce_sum else losses.mean(dim=1)

    return losses_of


def _distilled(config: LossConfig, loss: "Loss", teacher: "Teacher") -> "Loss":
    """(1 - share) of `loss` plus `share` of the distance from the teacher.

    soft: temperature**2 times KL(teacher || student) of the softened probabilities, summed over
    the classes (Hinton et al. 2015; DeiT, eq. 2; its code also divides by their number). hard:
    cross-entropy with the teacher's top class (DeiT, eq. 3), not smoothed. Both use the logits of
    the classifier; there is no distillation token.
    """
    from torch.nn import functional as F

    share, temperature = config.distillation_share, config.temperature

    def hard(logits: "Tensor", teachers: "Tensor") -> "Tensor":
        return F.cross_entropy(logits, teachers.argmax(dim=1), reduction="none")

    def soft(logits: "Tensor", teachers: "Tensor") -> "Tensor":
        student, target = (F.log_softmax(x / temperature, dim=1) for x in (logits, teachers))
        divergence = F.kl_div(student, target, reduction="none", log_target=True)
        return divergence.sum(dim=1) * temperature**2

    distance = hard if config.distillation == "hard" else soft

    def losses_of(logits: "Tensor", batch: "MicroBatch") -> "Tensor":
        teachers = teacher(batch.images_BCHW)
        return (1 - share) * loss(logits, batch) + share * distance(logits, teachers)

    return losses_of
