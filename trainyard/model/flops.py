"""The number of floating-point operations of a model."""

from itertools import chain
from typing import TYPE_CHECKING

from trainyard.image_size import ImageSize, height_width

if TYPE_CHECKING:
    from torch import nn

_BATCH = 2  # batch norm rejects a single sample of one pixel


def forward_flops(model: "nn.Module", image_size: ImageSize, channels: int = 3) -> int:
    """Floating-point operations of one image's forward pass; training takes three times as many.

    A multiply-add counts as two, as in peaks of devices: twice the FLOPs or MACs of papers.
    Convolutions, matrix products and attention count. Nothing is computed: meta tensors pass
    through the model, which stays unchanged, on any device.
    """
    return sum(flops_by_operation(model, image_size, channels).values())


def flops_by_operation(
    model: "nn.Module", image_size: ImageSize, channels: int = 3
) -> dict[str, int]:
    """`forward_flops` by the names of torch's operations, such as "aten.convolution"."""
    import torch
    from torch.func import functional_call
    from torch.utils.flop_counter import FlopCounterMode

    tensors = chain(model.named_parameters(), model.named_buffers())
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    images = torch.empty(_BATCH, channels, *height_width(image_size), device="meta")
    counter = FlopCounterMode(display=False)
    # A compiled model runs uncompiled here.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), counter:
        functional_call(model, shapes, (images,))
    counts = counter.get_flop_counts().get("Global", {})
    return {str(operation): int(count) // _BATCH for operation, count in counts.items()}
