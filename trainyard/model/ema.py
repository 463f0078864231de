"""An exponential moving average of the weights."""

import torch
from torch import nn


class Ema:
    """average = decay * average + (1 - decay) * weights, buffers too (timm's ModelEmaV3).

    With warm-up the decay after n updates is 1 - n^(-2/3), until it reaches its value. The average
    is the only state: the decay follows from the step. A skipped update counts too: the average
    then moves on towards unchanged weights.
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
        """Call after the update of each step, counted from 0. The first call copies the weights."""
        from torch.distributed.tensor import DTensor

        # One call cannot average sharded weights together with buffers that are not sharded.
        self._ema.foreach &= not isinstance(next(self.module.parameters()), DTensor)
        self._ema.update(self._model, step + 1)  # timm counts updates
