"""Snapshots of batch-norm statistics, to undo a skipped or repeated step."""

import torch
from torch import Tensor, nn

from trainyard.averaging.flat import flatten, unflatten_into


class Buffers:
    """A model's buffers as they were before a step, for a step that is repeated or skipped.

    The copies are flat, one per dtype: a ResNet-50 has 159 small buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        """The model must write its buffers in place, not replace them."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            kinds.setdefault(buffer.dtype, []).append(buffer)
        self._kinds = list(kinds.values())
        self._flat = [flatten(buffers) for buffers in self._kinds]

    @torch.no_grad()
    def remember(self) -> None:
        for buffers, flat in zip(self._kinds, self._flat, strict=True):
            torch.cat([buffer.reshape(-1) for buffer in buffers], out=flat)

    @torch.no_grad()
    def restore(self) -> None:
        for buffers, flat in zip(self._kinds, self._flat, strict=True):
            unflatten_into(buffers, flat)

    @torch.no_grad()
    def restore_if(self, *reasons: Tensor) -> None:
        """Restore where any of `reasons`, scalars on the device, is not 0, without synchronising.

        Integer counters are left: unlike statistics, they cannot become non-finite.
        """
        is_due = torch.stack([reason.bool() for reason in reasons]).any()
        for buffers, flat in zip(self._kinds, self._flat, strict=True):
            if flat.is_floating_point():
                now = flatten(buffers)
                unflatten_into(buffers, torch.where(is_due, flat, now))
