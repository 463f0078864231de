"""Batches as a feed makes them, for tests of what takes one."""

import torch
from torch import Tensor

from trainyard.data.batch import Batch


def batch_of_images(
    images_BCHW: Tensor, labels: Tensor | None = None, weights: Tensor | None = None
) -> Batch:
    """A batch without mixed images. Ids count from 0; so do labels if none are given."""
    ids = torch.arange(len(images_BCHW))
    labels = ids if labels is None else labels
    ones = torch.ones(len(ids), device=images_BCHW.device)
    return Batch(
        ids=ids,
        epochs=torch.zeros_like(ids),
        labels=labels,
        weights=ones if weights is None else weights,
        images_BCHW=images_BCHW,
        mixed_labels=labels,
        lam=ones,
    )
