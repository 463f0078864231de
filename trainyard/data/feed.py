"""Batches on the device: copied, augmented, normalised, mixed."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainyard.course import Course, Every, Phase
from trainyard.data.loader_client import BadSample, HostBatch
from trainyard.data.transforms import BatchTransform, Keys, MixedBatch, PixelTransform


class Batch(NamedTuple):
    """One rank's share of a global batch, on the device."""

    images_BCHW: Tensor  # float32, normalised
    labels: Tensor  # int64[B]
    mixed_labels: Tensor  # int64[B], of the samples that were mixed in; `labels` where none was
    lam: Tensor  # float32[B], the share of `labels` in the target; 1 where nothing was mixed in
    weights: Tensor  # float32[B], 0 for a bad sample, else 1
    ids: Tensor  # int64[B], on the host
    bad: list[BadSample]


class Augmentation(NamedTuple):
    """What a training feed does to batches, and where in the stream its first one lies."""

    pixel_transforms: Sequence[PixelTransform] = ()
    batch_transforms: Sequence[BatchTransform] = ()
    position: int = 0  # samples of the stream before it
    global_batch: int = 0


NONE = Augmentation()


class HostBatches(Protocol):
    """A loader, to a feed."""

    def __iter__(self) -> Iterator[HostBatch]: ...
    def close(self) -> None: ...


class Feed:
    """Turns a loader's batches into device batches; closes the loader with itself."""

    def __init__(
        self,
        loader: HostBatches,
        device: torch.device,
        *,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        channels_last: bool,
        augmentation: Augmentation = NONE,
    ) -> None:
        self._loader = loader
        self._device = device
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._shift = torch.tensor(mean, device=device).mul(255).view(1, 3, 1, 1)
        self._scale = torch.tensor(std, device=device).mul(255).reciprocal().view(1, 3, 1, 1)
        self._augmentation, self._position = augmentation, augmentation.position

    def __iter__(self) -> Iterator[Batch]:
        for host in self._loader:
            yield self._move(host)
            self._position += self._augmentation.global_batch

    def _move(self, host: HostBatch) -> Batch:
        """A device batch that shares no memory with the ring."""
        keys = Keys(host.ids.copy(), host.visits.copy(), self._position)
        pixels_BCHW = torch.from_numpy(host.images_BHWC).to(self._device).permute(0, 3, 1, 2)
        for pixel_transform in self._augmentation.pixel_transforms:
            pixels_BCHW = pixel_transform(pixels_BCHW, keys)
        images_BCHW = pixels_BCHW.float().sub_(self._shift).mul_(self._scale)
        labels = torch.from_numpy(host.labels.copy()).to(self._device)
        weights = torch.from_numpy(host.weights.copy()).to(self._device)
        mixed = MixedBatch(
            images_BCHW.contiguous(memory_format=self._layout),
            labels,
            mixed_labels=labels,
            lam=torch.ones_like(weights),
            weights=weights,
        )
        for batch_transform in self._augmentation.batch_transforms:
            mixed = batch_transform(mixed, keys)
        return Batch(*mixed, ids=torch.from_numpy(keys.ids), bad=host.bad)

    def close(self) -> None:
        self._loader.close()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrainingFeed:
    """Batches of a run from a step on, through all phases of its course."""

    def __init__(self, course: Course, open_phase: Callable[[Phase, int, int], Feed]) -> None:
        """`open_phase(phase, step, skipped)` begins at a step of the phase; see `seek`."""
        self._course, self._open_phase = course, open_phase
        self._feed: Feed | None = None
        self._batches: Iterator[Batch] = iter(())

    def seek(self, step: int, skipped: int) -> None:
        """Go on at `step` of the run, passing over `skipped` samples of the stream."""
        self.close()
        self._batches = self._from(step, skipped)

    def _from(self, step: int, skipped: int) -> Iterator[Batch]:
        while step < self._course.num_steps:
            phase = self._course.phase(step)
            with self._open_phase(phase, step, skipped) as self._feed:
                yield from self._feed
            step = phase.stop

    def is_over(self, step: int) -> bool:
        """Whether the run is over after `step` steps of it."""
        return step >= self._course.num_steps

    def saving(self, every: Every) -> Every:
        """When to save: at any step alike."""
        return every

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()

    def __enter__(self) -> "TrainingFeed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
