"""Exponential moving averages of the weights."""

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain

import torch
from torch import Tensor, nn


class Ema:
    """average = decay * average + (1 - decay) * weights, buffers too (timm's ModelEmaV3).

    With warm-up the decay after n updates is 1 - n^(-2/3), until it reaches its value. The average
    is the only state: the decay follows from the step. A skipped update counts too: the average
    then moves on towards unchanged weights.

    timm's class collects the tensors anew in each step, 1.4 ms more for a ResNet-50 on a CPU.
    """

    def __init__(
        self, model: nn.Module, decays: Mapping[str, float], *, warmup: bool, cpu: bool
    ) -> None:
        """An average for each decay, under its name in `modules`.

        `cpu` keeps the averages in host memory: each update then waits for copies.
        """
        self._model, self._decays, self._warmup = model, decays, warmup
        self.modules: dict[str, nn.Module] = {name: deepcopy(model).eval() for name in decays}
        for module in self.modules.values() if cpu else ():
            module.to("cpu")
        self._weights: list[Tensor] = []
        self._averages: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Call after the update of each step, counted from 0. The first call copies the weights."""
        # A sharded model has its parameters only once it is wrapped, after __init__.
        self._weights = self._weights or _saved(self._model)
        self._averages = self._averages or {n: _saved(m) for n, m in self.modules.items()}
        device = _local(next(iter(self._averages.values()))[0]).device
        floats, counters = _apart([_local(tensor).to(device) for tensor in self._weights])
        for name, tensors in self._averages.items():
            averages, averaged_counters = _apart([_local(tensor) for tensor in tensors])
            torch._foreach_lerp_(averages, floats, 1.0 - self._decay_at(step, name))
            if counters:
                torch._foreach_copy_(averaged_counters, counters)

    def _decay_at(self, step: int, name: str) -> float:
        if step == 0:
            return 0.0
        decay = self._decays[name]
        # Like timm, to the last bit.
        return min(1 - (1 + step / 1.0) ** -(2 / 3), decay) if self._warmup else decay


def _saved(module: nn.Module) -> list[Tensor]:
    """Parameters and saved buffers: the others are constants."""
    saved = module.state_dict().keys()
    named = chain(module.named_parameters(), module.named_buffers())
    return [tensor for name, tensor in named if name in saved]


def _local(tensor: Tensor) -> Tensor:
    """A tensor, or this rank's part of a sharded one."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _apart(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Floating-point tensors, and the others: counters of batch norm."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return floats, [tensor for tensor in tensors if not tensor.is_floating_point()]
