"""Losses of each sample of a micro-batch, of which the step takes the weighted mean."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainyard.section import Section

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainyard.train.step import MicroBatch

    Loss = Callable[[Tensor, MicroBatch], Tensor]


class LossConfig(Section):
    name: Literal["ce", "bce"] = "ce"
    """Cross-entropy over all classes, or binary cross-entropy of each class."""
    bce_threshold: float | None = Field(None, ge=0, lt=1)
    """Of bce: targets above it become 1, others 0; as they are if not given."""
    bce_sum: bool = False
    """Of bce: the sum over the classes instead of their mean."""
    teacher: str | None = None
    """A run or checkpoint to distil from."""
    distillation: Literal["soft", "hard"] = "soft"
    """Learn the teacher's probabilities, or its best guess."""
    distillation_share: float = Field(0.5, ge=0, le=1)
    """Share of the teacher in the loss."""
    temperature: float = Field(1.0, gt=0)
    """Of soft distillation."""


def build_loss(config: LossConfig, smoothing: float, teacher: "nn.Module | None") -> "Loss":
    """float32 logits[B, C] and their micro-batch to losses[B]."""
    from torch.nn import functional as F

    def cross_entropy(logits: "Tensor", batch: "MicroBatch") -> "Tensor":
        own, mixed = (
            F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
            for labels in (batch.labels, batch.mixed_labels)
        )
        return batch.lam * own + (1 - batch.lam) * mixed

    return cross_entropy
