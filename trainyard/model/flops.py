"""How much a model computes."""

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_BATCH = 2  # batch norm refuses to take one sample of one pixel


def forward_flops(model: "nn.Module", image_size: int) -> int:
    """Floating-point operations of one image's forward pass; training takes three times as many.

    A multiply-add counts two, as peaks of devices do; twice what papers call FLOPs or MACs.
    Convolutions, matrix products and attention count. Nothing is computed: the model, on whatever
    device it is, stays as it is, and meta tensors go through it.
    """
    import torch
    from torch.func import functional_call
    from torch.utils.flop_counter import FlopCounterMode

    tensors = chain(model.named_parameters(), model.named_buffers())
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    images = torch.empty(_BATCH, 3, image_size, image_size, device="meta")
    counter = FlopCounterMode(display=False)
    # A compiled model is run as it was written.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), counter:
        functional_call(model, shapes, (images,))
    return int(counter.get_total_flops()) // _BATCH
