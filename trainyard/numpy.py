"""Trainyard's data path for loops on NumPy arrays, such as those of JAX and Keras.

from trainyard.numpy import loader

train = loader("data/digits", batch_size=64, image_size=32, flip=0.0)
for images, labels in train: ...
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainyard import torch as of_torch
from trainyard.data.storage.source import Closing
from trainyard.torch import Locations, TorchLoader


def loader(location: Locations, batch_size: int, **arguments: Any) -> "NumpyLoader":
    """Batches (images, labels) as arrays; the arguments are those of `trainyard.torch.loader`.

    Images are float32[B, H, W, C], normalised, or with dtype=numpy.uint8 pixels. For ranks that
    torch.distributed does not know, give `rank` and `world_size`: jax.process_index() and
    jax.process_count(), say.
    """
    dtype = getattr(torch, np.dtype(arguments.pop("dtype", np.float32)).name)
    batches = of_torch.loader(location, batch_size, dtype=dtype, channels_last=True, **arguments)
    return NumpyLoader(batches)


class NumpyLoader(Closing):
    """A TorchLoader whose batches are arrays; all else is as there."""

    def __init__(self, batches: TorchLoader) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[NDArray[Any], ...]]:
        for images_BCHW, *others in self._batches:
            images_BHWC = images_BCHW.permute(0, 2, 3, 1)
            yield images_BHWC.numpy(), *(tensor.numpy() for tensor in others)

    def close(self) -> None:
        self._batches.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
