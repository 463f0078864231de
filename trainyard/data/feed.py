"""Batches on the device: copied, augmented, normalised, mixed."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from trainyard.course import Course, Due, Phase
from trainyard.data.device.copies import Arriving, Carrier
from trainyard.data.device.normalise import Normalise
from trainyard.data.loading.client import BadSample, HostBatch
from trainyard.data.transforms.batches import BatchTransform, Keys, MixedBatch, PixelTransform


class Batch(NamedTuple):
    """One rank's share of a global batch, on the device."""

    images_BCHW: Tensor  # normalised; float32, or what Normalise was told
    labels: Tensor  # int64[B]
    mixed_labels: Tensor  # int64[B], of the samples that were mixed in; `labels` where none was
    lam: Tensor  # float32[B], the share of `labels` in the target; 1 where nothing was mixed in
    weights: Tensor  # float32[B], 0 for a bad sample, else 1
    ids: Tensor  # int64[B], on the host
    bad: list[BadSample]
    capacity: float = 0.0  # images a second of the loader, 0 if not known; see HostBatch


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


@runtime_checkable
class Foreseen(Protocol):
    """A loader whose batches may be taken before the trainer asks for them."""

    def is_ready(self) -> bool:
        """Whether the next batch can be taken without waiting."""


class Feed:
    """Turns a loader's batches into device batches; closes the loader with itself."""

    def __init__(
        self,
        loader: HostBatches,
        normalise: Normalise,
        carrier: Carrier,
        augmentation: Augmentation = NONE,
    ) -> None:
        self._loader, self._normalise, self._carrier = loader, normalise, carrier
        self._augmentation, self._position = augmentation, augmentation.position

    def __iter__(self) -> Iterator[Batch]:
        for arriving in self._on_their_way():
            yield self._move(arriving)
            self._position += self._augmentation.global_batch

    def _on_their_way(self) -> Iterator[Arriving]:
        """Each batch; further ones are sent off first, if they are there already."""
        hosts = iter(self._loader)
        sent: deque[Arriving | Exception] = deque()
        while True:
            following = sent.popleft() if sent else self._send(hosts)
            if isinstance(following, StopIteration):
                return
            if isinstance(following, Exception):
                raise following
            while len(sent) < self._carrier.ahead and self._is_ready():
                sent.append(self._send(hosts))
            yield following

    def _is_ready(self) -> bool:
        return isinstance(self._loader, Foreseen) and self._loader.is_ready()

    def _send(self, hosts: Iterator[HostBatch]) -> Arriving | Exception:
        """The next batch, sent off, or why there is none, to be raised when it is its turn."""
        self._carrier.settle()
        try:
            return self._carrier.start(next(hosts))
        except Exception as error:
            return error

    def _move(self, arriving: Arriving) -> Batch:
        """A device batch that shares no memory with the loader."""
        keys = Keys(arriving.ids, arriving.visits, self._position)
        with arriving.pixels_BHWC() as pixels_BHWC:
            pixels_BCHW = pixels_BHWC.permute(0, 3, 1, 2)
            for pixel_transform in self._augmentation.pixel_transforms:
                pixels_BCHW = pixel_transform(pixels_BCHW, keys)
            images_BCHW = self._normalise(pixels_BCHW)
        labels, weights = arriving.labels, arriving.weights
        mixed = MixedBatch(
            images_BCHW,
            labels,
            mixed_labels=labels,
            lam=torch.ones_like(weights),
            weights=weights,
        )
        for batch_transform in self._augmentation.batch_transforms:
            mixed = batch_transform(mixed, keys)
        ids = torch.from_numpy(keys.ids)
        return Batch(*mixed, ids=ids, bad=arriving.bad, capacity=arriving.capacity)

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

    def saving(self, every: Due) -> Due:
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
