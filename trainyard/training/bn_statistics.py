"""Re-estimation of batch norm statistics for weights that training never ran with."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainyard.averaging.flat import flatten, unflatten_into
from trainyard.averaging.sync_bn import without_sync
from trainyard.data.batch import Batch
from trainyard.errors import DataError
from trainyard.training.precision import autocast
from trainyard.world import World, total


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers that keep running statistics, without frozen ones."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    # model/freeze.py gives a frozen layer its own train().
    return [x for x in layers if x.running_mean is not None and "train" not in vars(x)]


@torch.no_grad()
def estimate_statistics(
    models: Sequence[nn.Module],
    batches: Iterable[Batch],
    *,
    world: World,
    precision: torch.dtype | None = None,
) -> int:
    """Set the statistics of batch norm layers to their mean over the images of all ranks' batches.

    Each batch, on each rank, is normalised with its own statistics, as in training. Unlike torch's
    update_bn, other layers are in evaluation mode, without dropout; frozen statistics stay; and one
    pass over the images serves several models. Unreadable samples do not take part, nor does a
    sample that is alone in its batch; DataError if none is left. Returns the number of images that
    took part.
    """
    layers = [layer for model in models for layer in batch_norms(model)]
    assert layers, "a model without batch norm has no statistics"
    running = [part for layer in layers for part in (layer.running_mean, layer.running_var)]
    statistics = [tensor for tensor in running if tensor is not None]
    sums = flatten([tensor.double() for tensor in statistics]).zero_()
    images = 0
    with _normalising_by_batch(models, layers, statistics), without_sync(models):
        for batch in batches:
            images_BCHW = batch.images_BCHW[batch.weights > 0]
            count = len(images_BCHW)
            if count < 2:  # a single value has no variance; a sharded model needs all ranks
                count, images_BCHW = 0, batch.images_BCHW.new_zeros(2, *batch.images_BCHW.shape[1:])
            for model in models:
                with autocast(images_BCHW.device, precision):
                    model(images_BCHW)
            sums += count * flatten([tensor.double() for tensor in statistics])
            images += count
    merged = total(world, torch.cat([sums, sums.new_tensor([images])]))
    everyone = int(merged[-1])
    if not everyone:
        raise DataError(
            "data.batches-unreadable",
            "batch norm statistics: no two training images of a batch can be read",
        )
    unflatten_into(statistics, merged[:-1] / everyone)
    return everyone


@contextmanager
def _normalising_by_batch(
    models: Sequence[nn.Module], layers: Sequence[_BatchNorm], statistics: Sequence[Tensor]
) -> Iterator[None]:
    """Inside, the statistics of layers are those of the last batch; other layers evaluate."""
    was_training = {module: module.training for model in models for module in model.modules()}
    momenta = [layer.momentum for layer in layers]
    buffers = [*statistics, *(n for x in layers if (n := x.num_batches_tracked) is not None)]
    copies = [buffer.clone() for buffer in buffers]
    for model in models:
        model.eval()
    for layer in layers:
        layer.training, layer.momentum = True, 1.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for buffer, copy in zip(buffers, copies, strict=True):
            buffer.copy_(copy)
        for module, training in was_training.items():
            module.training = training
