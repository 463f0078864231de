"""Batch norm over the samples of all replicas (torch's SyncBatchNorm)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainyard.errors import RecipeError


def convert_to_sync(model: nn.Module) -> None:
    """Replaces a model's batch norm layers, keeping their names, weights and statistics.

    RecipeError for a model on the CPU, where torch has no SyncBatchNorm.
    """
    from timm.layers import convert_sync_batchnorm

    if next(model.parameters()).device.type == "cpu":
        raise RecipeError(
            "recipe.sync-batch-norm-needs-gpu",
            "average.batch_norm = 'sync' needs GPUs: remove it, and each replica normalises by "
            "its own samples",
        )
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            # A frozen layer has a train() of its own and no statistics to synchronise.
            if isinstance(layer, _BatchNorm) and "train" not in vars(layer):
                setattr(module, name, convert_sync_batchnorm(layer))  # type: ignore[no-untyped-call]


@contextmanager
def without_sync(models: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which each rank normalises by its own samples and waits for no other rank."""
    modules = [module for model in models for module in model.modules()]
    layers = [module for module in modules if isinstance(module, nn.SyncBatchNorm)]
    for layer in layers:
        layer.process_group = dist.GroupMember.NON_GROUP_MEMBER
    try:
        yield
    finally:
        for layer in layers:
            layer.process_group = None
