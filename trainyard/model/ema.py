"""An exponential moving average of the weights."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain

import torch
from torch import Tensor, nn


class Ema:
    """average = decay * average + (1 - decay) * weights, buffers too (timm's ModelEmaV3).

    With warm-up the decay after n updates is 1 - n^(-2/3), until it reaches its value. The average
    is the only state: the decay follows from the step. A skipped update counts too: the average
    then moves on towards unchanged weights.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool, cpu: bool) -> None:
        """`cpu` keeps the average in host memory: each update then waits for a copy."""
        self._model, self._decay, self._warmup = model, decay, warmup
        self.module: nn.Module = deepcopy(model).eval()
        if cpu:
            self.module.to("cpu")
        self._pairs: list[tuple[Tensor, Tensor]] = []  # average and weight

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Call after the update of each step, counted from 0. The first call copies the weights."""
        # A sharded model has its parameters only once it is wrapped, after __init__.
        self._pairs = self._pairs or list(
            zip(_saved(self.module), _saved(self._model), strict=True)
        )
        averages, weights = ([_local(pair[place]) for pair in self._pairs] for place in (0, 1))
        if averages[0].device != weights[0].device:
            weights = _on_host(weights)
        (averages, averaged_counters), (weights, counters) = _apart(averages), _apart(weights)
        torch._foreach_lerp_(averages, weights, 1.0 - self._decay_at(step))
        if counters:
            torch._foreach_copy_(averaged_counters, counters)

    def _decay_at(self, step: int) -> float:
        if step == 0:
            return 0.0
        # Like timm, to the last bit.
        return min(1 - (1 + step / 1.0) ** -(2 / 3), self._decay) if self._warmup else self._decay


def _saved(module: nn.Module) -> list[Tensor]:
    """Parameters and saved buffers: the others are constants."""
    saved = module.state_dict().keys()
    named = chain(module.named_parameters(), module.named_buffers())
    return [tensor for name, tensor in named if name in saved]


def _local(tensor: Tensor) -> Tensor:
    """A tensor, or this rank's part of a sharded one."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _apart(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Floating-point tensors, and the others: counters of batch norm."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return floats, [tensor for tensor in tensors if not tensor.is_floating_point()]


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Host copies, in one copy for each dtype."""
    found: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        some = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[number].reshape(-1) for number in some]).cpu()
        parts = torch.split(flat, [tensors[number].numel() for number in some])
        found |= {n: part.view(tensors[n].shape) for n, part in zip(some, parts, strict=True)}
    return [found[number] for number in range(len(tensors))]
