"""Batches on the device: copied, laid out, normalised."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.data.loader import BadSample, HostBatch, Loader


class Batch(NamedTuple):
    """One rank's share of a global batch, on the device."""

    images_BCHW: Tensor  # float32, normalised
    labels: Tensor  # int64[B]
    ids: Tensor  # int64[B], on the host
    weights: Tensor  # float32[B], 0 for a bad sample, else 1
    bad: list[BadSample]


class Feed:
    """Turns a loader's batches into device batches; closes the loader with itself."""

    def __init__(
        self,
        loader: Loader,
        device: torch.device,
        *,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        channels_last: bool,
    ) -> None:
        self._loader = loader
        self._device = device
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._shift = torch.tensor(mean, device=device).mul(255).view(1, 3, 1, 1)
        self._scale = torch.tensor(std, device=device).mul(255).reciprocal().view(1, 3, 1, 1)

    def __iter__(self) -> Iterator[Batch]:
        for host in self._loader:
            yield self._move(host)

    def _move(self, host: HostBatch) -> Batch:
        """A device batch that shares no memory with the ring."""
        images_BHWC = torch.from_numpy(host.images_BHWC).to(self._device)
        images_BCHW = images_BHWC.permute(0, 3, 1, 2).float().sub_(self._shift).mul_(self._scale)
        return Batch(
            images_BCHW=images_BCHW.contiguous(memory_format=self._layout),
            labels=torch.from_numpy(host.labels.copy()).to(self._device),
            ids=torch.from_numpy(host.ids.copy()),
            weights=torch.from_numpy(host.weights.copy()).to(self._device),
            bad=host.bad,
        )

    def close(self) -> None:
        self._loader.close()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
