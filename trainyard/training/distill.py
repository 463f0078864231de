"""A trained model as a teacher (Hinton et al. 2015; Touvron et al. 2021, section 4)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainyard.training.precision import autocast


def as_teacher(model: nn.Module, precision: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """A function from images to float32 logits of the model, frozen and in evaluation mode."""
    model.eval().requires_grad_(False)

    def logits_of(images_BCHW: Tensor) -> Tensor:
        # Not inference_mode: the logits take part in the student's backward pass.
        with torch.no_grad(), autocast(images_BCHW.device, precision):
            logits: Tensor = model(images_BCHW)
        return logits.float()

    return logits_of
