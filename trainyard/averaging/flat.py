"""Many tensors as a flat one, to be sent or copied at once."""

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The numbers of tensors of one kind, one tensor after the other; a copy."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def unflatten_into(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Put numbers that lie as `flatten` has them into tensors, of whatever kind and device."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    views = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_([*tensors], views)
