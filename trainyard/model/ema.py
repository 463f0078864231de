"""An exponential moving average of the weights."""

import torch
from torch import nn


class Ema:
    """average = decay * average + (1 - decay) * weights, buffers too (timm's ModelEmaV3)."""

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
        """After the update of a step, counted from 0."""
        self._ema.update(self._model, step)
