"""Batches on the device: copied, augmented, normalised and mixed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from trainyard.course import Course, Due, Phase
from trainyard.data.augment.transforms import BatchTransform, PixelTransform
from trainyard.data.batch import COLUMNS, Batch, HostBatch, Keys, Samples
from trainyard.data.device.copies import InFlightBatch, Transfer
from trainyard.data.device.normalise import Normalise


class HostBatches(Protocol):
    """The part of a loader that a feed uses."""

    def __iter__(self) -> Iterator[HostBatch]: ...
    def close(self) -> None: ...


@runtime_checkable
class PollableLoader(Protocol):
    """A loader whose batches a feed may take before the trainer asks for them."""

    def is_ready(self) -> bool:
        """True if the next batch can be taken without waiting."""


class Feed:
    """Turns a loader's batches into device batches; `close` closes the loader too."""

    def __init__(
        self,
        loader: HostBatches,
        normalise: Normalise,
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

    def _on_their_way(self) -> Iterator[InFlightBatch]:
        """Each batch in order; starts the copies of further batches first, if they are ready."""
        hosts = iter(self._loader)
        sent: deque[InFlightBatch | Exception] = deque()
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
        return isinstance(self._loader, PollableLoader) and self._loader.is_ready()

    def _send(self, hosts: Iterator[HostBatch]) -> InFlightBatch | Exception:
        """Starts copying the next batch; returns exceptions, StopIteration too, for later."""
        self._transfer.release_finished()
        try:
            return self._transfer.start(next(hosts))
        except Exception as error:
            return error

    def _move(self, in_flight: InFlightBatch) -> Batch:
        """A device batch that shares no memory with the loader."""
        ranks = self._batch_transforms
        size = len(in_flight.samples.ids) // len(ranks)
        parts = []
        with in_flight.pixels_BHWC() as pixels_BHWC:
            for number, transforms in enumerate(ranks):
                rows = slice(size * number, size * (number + 1)) if len(ranks) > 1 else slice(None)
                samples = in_flight.samples.map(itemgetter(rows))
                parts.append(self._augmented(samples, pixels_BHWC[rows], transforms))
        return replace(_joined(parts), bad=in_flight.bad, capacity=in_flight.capacity)

    def _augmented(
        self, samples: Samples[Tensor], pixels_BHWC: Tensor, transforms: Sequence[BatchTransform]
    ) -> Batch:
        """The samples of one virtual rank, in memory of their own."""
        keys = Keys(samples.ids.numpy(), samples.epochs.numpy(), self._position)
        pixels_BCHW = pixels_BHWC.permute(0, 3, 1, 2)
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

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_TENSORS = [*COLUMNS, "images_BCHW", "mixed_labels", "lam"]  # of a Batch


def _joined(parts: Sequence[Batch]) -> Batch:
    """One batch of the samples of all."""
    if len(parts) == 1:
        return parts[0]
    tensors: Any = {name: torch.cat([getattr(part, name) for part in parts]) for name in _TENSORS}
    return Batch(**tensors)


def split(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    """Copies of the samples of each of `count` virtual ranks, but for those without samples.

    A copy has the alignment of a whole batch, on which a kernel may depend.
    """
    for batch in batches:
        columns = [getattr(batch, name).tensor_split(count) for name in _TENSORS]
        for part in zip(*columns, strict=True):
            if len(part[0]):
                tensors: Any = zip(_TENSORS, [tensor.clone() for tensor in part], strict=True)
                yield Batch(**dict(tensors))


class EvaluationFeeds:
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

    def __enter__(self) -> "EvaluationFeeds":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrainingFeed:
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

    def __enter__(self) -> "TrainingFeed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
