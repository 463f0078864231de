"""Batches on the device: copied, augmented, normalised and mixed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from trainyard.course import Course, Due, Phase
from trainyard.data.augment.transforms import BatchTransform, PixelTransform
from trainyard.data.batch import TENSORS, Batch, HostBatch, Keys, PixelBatch
from trainyard.data.device.copies import Transfer
from trainyard.data.storage.source import Closing


class Normalise:
    """Maps uint8 pixels to (pixels - 255 mean) / (255 std), in new memory."""

    def __init__(
        self,
        device: torch.device,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        channels_last: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`mean` and `std`: of each channel, on a scale of 0 to 1. Results are float32, rounded
        to `dtype`.
        """
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._dtype = dtype
        self._shift = torch.tensor(mean, device=device).mul(255).view(1, -1, 1, 1)
        self._scale = torch.tensor(std, device=device).mul(255).reciprocal().view(1, -1, 1, 1)
        self._bias = -self._shift * self._scale

    def __call__(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalises uint8[B, C, H, W] of any layout to `dtype`, in the layout of the model."""
        if pixels_BCHW.device.type == "cpu":
            return self._in_passes(pixels_BCHW).to(self._dtype)
        return self._in_one_kernel(pixels_BCHW)

    def _in_one_kernel(self, pixels_BCHW: Tensor) -> Tensor:
        """Fuses conversion, product, sum, rounding and layout; 3e-7 off, by another order."""
        images_BCHW = self._empty(pixels_BCHW, self._dtype)
        return torch.addcmul(self._bias, pixels_BCHW, self._scale, out=images_BCHW)

    def _in_passes(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalises in place, since allocating memory takes most of the time."""
        images_BCHW = self._empty(pixels_BCHW, torch.float32)
        images_BHWC, pixels_BHWC = (x.permute(0, 2, 3, 1) for x in (images_BCHW, pixels_BCHW))
        if images_BHWC.is_contiguous() and pixels_BHWC.is_contiguous():
            # On whole rows of pixels: a last dimension of few channels is slow.
            channels = (x.view(1, 1, 1, -1) for x in (self._shift, self._scale))
            shift, scale = (x.repeat(1, 1, 1, images_BCHW.shape[3]) for x in channels)
            rows = images_BHWC.flatten(2).copy_(pixels_BHWC.flatten(2))
            rows.sub_(shift.view(-1)).mul_(scale.view(-1))
            return images_BCHW
        return images_BCHW.copy_(pixels_BCHW).sub_(self._shift).mul_(self._scale)

    def _empty(self, pixels_BCHW: Tensor, dtype: torch.dtype) -> Tensor:
        device = pixels_BCHW.device
        return torch.empty(
            pixels_BCHW.shape, dtype=dtype, device=device, memory_format=self._layout
        )


class Pixels:
    """Copies uint8 pixels as they are, in the layout of the model."""

    def __init__(self, *, channels_last: bool) -> None:
        self._layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, pixels_BCHW: Tensor) -> Tensor:
        return pixels_BCHW.clone(memory_format=self._layout)


class HostBatches(Protocol):
    """The part of a loader that a feed uses.

    A feed may take batches ahead of one with `is_ready`, which tells if that needs no waiting.
    """

    def __iter__(self) -> Iterator[HostBatch]: ...
    def close(self) -> None: ...


class Feed(Closing):
    """Turns a loader's batches into device batches; `close` closes the loader too."""

    def __init__(
        self,
        loader: HostBatches,
        normalise: Callable[[Tensor], Tensor],
        transfer: Transfer,
        *,
        pixel_transforms: Sequence[PixelTransform] = (),
        batch_transforms: Sequence[Sequence[BatchTransform]] = ((),),
        position: int = 0,
        global_batch: int = 0,
    ) -> None:
        """`batch_transforms`: those of each virtual rank of this rank, which have equal parts of a
        batch. `position`: samples of the stream before the first batch, of all ranks.
        """
        self._loader, self._normalise, self._transfer = loader, normalise, transfer
        self._pixel_transforms, self._batch_transforms = pixel_transforms, batch_transforms
        self._position, self._global_batch = position, global_batch
        self.is_over = False
        """True after the last batch: the loader has all of its memory back."""

    def __iter__(self) -> Iterator[Batch]:
        for in_flight in self._on_their_way():
            yield self._move(in_flight)
            self._position += self._global_batch

    def _on_their_way(self) -> Iterator[PixelBatch[Tensor]]:
        """Each batch in order; starts the copies of further batches first, if they are ready."""
        hosts = iter(self._loader)
        sent: deque[PixelBatch[Tensor] | Exception] = deque()
        while True:
            following = sent.popleft() if sent else self._send(hosts)
            if isinstance(following, StopIteration):
                self._transfer.release_all()
                self.is_over = True
                return
            if isinstance(following, Exception):
                raise following
            while len(sent) < self._transfer.ahead and self._is_ready():
                sent.append(self._send(hosts))
            yield following

    def _is_ready(self) -> bool:
        return bool(getattr(self._loader, "is_ready", lambda: False)())

    def _send(self, hosts: Iterator[HostBatch]) -> PixelBatch[Tensor] | Exception:
        """Starts copying the next batch; returns exceptions, StopIteration too, for later."""
        self._transfer.release_finished()
        try:
            return self._transfer.start(next(hosts))
        except Exception as error:
            return error

    def _move(self, in_flight: PixelBatch[Tensor]) -> Batch:
        """A device batch that shares no memory with the loader."""
        ranks = self._batch_transforms
        size = len(in_flight.ids) // len(ranks)
        parts = []
        release = in_flight.acquire()
        for number, transforms in enumerate(ranks):
            rows = slice(size * number, size * (number + 1)) if len(ranks) > 1 else slice(None)
            parts.append(self._augmented(in_flight.part(rows), transforms))
        release()
        return replace(_joined(parts), bad=in_flight.bad, capacity=in_flight.capacity)

    def _augmented(
        self, samples: PixelBatch[Tensor], transforms: Sequence[BatchTransform]
    ) -> Batch:
        """The samples of one virtual rank, in memory of their own."""
        keys = Keys(samples.ids.numpy(), samples.epochs.numpy(), self._position)
        pixels_BCHW = samples.images_BHWC.permute(0, 3, 1, 2)
        for pixel_transform in self._pixel_transforms:
            pixels_BCHW = pixel_transform(pixels_BCHW, keys)
        batch = Batch(
            **samples.columns(),
            images_BCHW=self._normalise(pixels_BCHW),
            mixed_labels=samples.labels,
            lam=torch.ones_like(samples.weights),
        )
        for batch_transform in transforms:
            batch = batch_transform(batch, keys)
        return batch

    def close(self) -> None:
        self._loader.close()


def _joined(parts: Sequence[Batch]) -> Batch:
    """One batch of the samples of all."""
    if len(parts) == 1:
        return parts[0]
    tensors: Any = {name: torch.cat([getattr(part, name) for part in parts]) for name in TENSORS}
    return Batch(**tensors)


def split(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    """Copies of the samples of each of `count` virtual ranks, but for those without samples.

    A batch without samples stays as one, from which this rank learns the width of scores.
    """
    for batch in batches:
        for number, part in enumerate(batch.split(count)):
            if not number or len(part.ids):
                yield part.aligned()


class EvaluationFeeds(Closing):
    """Feeds of one data set, one after the other, by one loader that is kept between them.

    The loader opens with the first feed. It closes with this object, and after a feed that was cut
    off. Between feeds its process is idle and keeps its ring of batches, page-locked for a GPU.
    """

    def __init__(
        self, open_loader: Callable[[], HostBatches], open_feed: Callable[[HostBatches], Feed]
    ) -> None:
        self._open_loader, self._open_feed = open_loader, open_feed
        self.loader: HostBatches | None = None
        """The loader, from the first feed on."""

    @contextmanager
    def one(self) -> Iterator[Feed]:
        """A feed of all batches; do not open another one inside."""
        if self.loader is None:
            self.loader = self._open_loader()
        feed = self._open_feed(self.loader)
        try:
            yield feed
        finally:
            if not feed.is_over:
                self.close()

    def close(self) -> None:
        """Ends the loader, if there is one."""
        loader, self.loader = self.loader, None
        if loader is not None:
            loader.close()


class TrainingFeed(Closing):
    """Batches of a run from any step on, through all phases of its course."""

    def __init__(self, course: Course, open_phase: Callable[[Phase, int, int], Feed]) -> None:
        """`open_phase(phase, step, skipped)` opens the feed of a phase at a step; see `seek`."""
        self._course, self._open_phase = course, open_phase
        self._feed: Feed | None = None
        self._batches: Iterator[Batch] = iter(())

    def seek(self, step: int, skipped: int) -> None:
        """Continues at `step` of the run, and passes over `skipped` samples of the stream."""
        self.close()
        self._batches = self._from(step, skipped)

    def _from(self, step: int, skipped: int) -> Iterator[Batch]:
        while step < self._course.num_steps:
            phase = self._course.phase(step)
            with self._open_phase(phase, step, skipped) as self._feed:
                yield from self._feed
            step = phase.stop

    def is_over(self, step: int) -> bool:
        """True if the run is over after `step` steps."""
        return step >= self._course.num_steps

    def saving(self, every: Due) -> Due:
        """The steps to save at; this feed can resume at any step."""
        return every

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
