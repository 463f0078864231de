"""Re-estimation of batch norm statistics for weights that training never ran with."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainyard.averaging.sync_bn import without_sync
from trainyard.errors import DataError
from trainyard.training.precision import autocast
from trainyard.training.step import WeightedImages
from trainyard.world import World, total

Sums = Tensor
"""float64[3, C] of a layer's inputs: count of values, their sum, and the sum of their squares."""


@dataclass
class _Seen:
    """Sums of the inputs of batch norm layers."""

    sums_of: dict[_BatchNorm, Sums]
    counts: bool = True
    """True while inputs are to be added."""

    def add(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Hook before the forward pass of a layer: adds its input."""
        if not self.counts:
            return
        assert isinstance(layer, _BatchNorm)
        values: Tensor = inputs[0].float()
        dims = [dim for dim in range(values.dim()) if dim != 1]
        variance, mean = torch.var_mean(values, dims, correction=0)
        mean, variance = mean.double(), variance.double()
        count = values.numel() // values.shape[1]
        sums = torch.stack([torch.ones_like(mean), mean, variance + mean**2])
        self.sums_of[layer].add_(sums, alpha=count)


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers that keep running statistics, without frozen ones."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    # model/freeze.py gives a frozen layer its own train().
    return [x for x in layers if x.running_mean is not None and "train" not in vars(x)]


@torch.no_grad()
def estimate_statistics(
    models: Sequence[nn.Module],
    batches: Iterable[WeightedImages],
    *,
    world: World,
    precision: torch.dtype | None = None,
) -> int:
    """Set the statistics of batch norm layers from their inputs over all ranks' batches.

    PreciseBN (Wu and Johnson 2021, "Rethinking 'Batch' in BatchNorm", section 3): each batch, on
    each rank, is normalised with its own statistics, and the mean and variance over all values
    replace the moving averages. Other layers are in evaluation mode: no dropout. Unreadable samples
    do not take part, nor does a sample that is alone in its batch; DataError if none is left.
    Returns the number of images that took part.
    """
    for model in models:
        layers = batch_norms(model)
        assert layers, "a model without batch norm has no statistics"
    images = 0
    with _observed(models) as seen, without_sync(models):
        for batch in batches:
            images_BCHW = batch.images_BCHW[batch.weights > 0]
            seen.counts = len(images_BCHW) > 1  # the variance of a single value would be zero
            images += len(images_BCHW) * seen.counts
            if not seen.counts:  # a sharded model needs all ranks in each forward pass
                images_BCHW = batch.images_BCHW.new_zeros(2, *batch.images_BCHW.shape[1:])
            for model in models:
                with autocast(images_BCHW.device, precision):
                    model(images_BCHW)
    merged = total(world, torch.cat(list(seen.sums_of.values()), dim=1))
    widths = [sums.shape[1] for sums in seen.sums_of.values()]
    if not merged[0].min() > 1:
        raise DataError("batch norm statistics: no two training images of a batch can be read")
    parts = torch.split(merged, widths, dim=1)
    for layer, (count, first, second) in zip(seen.sums_of, parts, strict=True):
        mean = first / count
        variance = (second / count - mean**2) * count / (count - 1)  # unbiased, as torch keeps it
        assert layer.running_mean is not None and layer.running_var is not None
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
    return int(total(world, merged.new_tensor(images)))


@contextmanager
def _observed(models: Sequence[nn.Module]) -> Iterator[_Seen]:
    """Inside, batch norm layers use batch statistics, keep their buffers, and record inputs."""
    was_training = {module: module.training for model in models for module in model.modules()}
    layers = [layer for model in models for layer in batch_norms(model)]
    sums_of = {
        layer: torch.zeros(3, layer.num_features, dtype=torch.float64, device=_device(layer))
        for layer in layers
    }
    seen = _Seen(sums_of)
    hooks = [layer.register_forward_pre_hook(seen.add) for layer in layers]
    for model in models:
        model.eval()
    for layer in layers:
        layer.training, layer.track_running_stats = True, False
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            layer.track_running_stats = True
        for module, training in was_training.items():
            module.training = training


def _device(layer: _BatchNorm) -> torch.device:
    assert layer.running_mean is not None
    return layer.running_mean.device
