"""An exponential moving average of the weights."""

import torch
from torch import nn


class Ema:
    """average = decay * average + (1 - decay) * weights, buffers too (timm's ModelEmaV3).

    With warm-up the decay after n updates is 1 - n^(-2/3), until it reaches its value. There is
    no state but the average: the decay follows from the step. An update that was skipped counts:
    the average then moves on towards weights that have stayed as they were.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool, cpu: bool) -> None:
        from timm.utils import ModelEmaV3

        device = torch.device("cpu") if cpu else None
        self._model = model
        self._ema = ModelEmaV3(model, decay=decay, use_warmup=warmup, device=device)

    @property
    def module(self) -> nn.Module:
        averaged: nn.Module = self._ema.module
        return averaged

    def update(self, step: int) -> None:
        """After the update of a step, counted from 0. The first one makes the average a copy."""
        from torch.distributed.tensor import DTensor

        # Sharded weights and buffers that are whole cannot be averaged in one call.
        self._ema.foreach &= not isinstance(next(self.module.parameters()), DTensor)
        self._ema.update(self._model, step + 1)  # timm counts updates
