"""Batches on their way to the device, ahead of the trainer where it computes on a GPU.

On a GPU copies run on a stream of their own, uint8, out of memory that is page-locked (see
`page_locked`). A batch goes back to the loader once its copy has finished.
"""

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.data.loading.client import BadSample, HostBatch, LoaderProcess

AHEAD = 1
"""Batches that are copied to a GPU beyond the one that the trainer has."""


@dataclass(frozen=True)
class Arriving:
    """A batch on its way to the device; its ids are on the host."""

    pixels_BHWC: Callable[[], AbstractContextManager[Tensor]]
    """uint8[B, H, W, 3] on the device; they may be altered, and are lost when the block is left."""
    labels: Tensor  # int64[B], like the weights to be used after the pixels only
    weights: Tensor  # float32[B]
    ids: NDArray[np.int64]
    visits: NDArray[np.int64]
    bad: list[BadSample]
    capacity: float = 0.0  # see HostBatch; not known of a loader that does not decode


class Carrier(Protocol):
    """Takes batches to a device."""

    ahead: int  # batches that may be on their way while the trainer has one

    def start(self, host: HostBatch) -> Arriving: ...
    def settle(self) -> None:
        """To be called before a batch is fetched: gives memory back to the loader."""


def carrier_to(device: torch.device) -> Carrier:
    return OnHost() if device.type == "cpu" else OnStream(device)


class OnHost:
    """For a trainer that computes on the CPU: pixels are used where the loader put them."""

    ahead = 0

    def start(self, host: HostBatch) -> Arriving:
        labels, weights = host.labels.copy(), host.weights.copy()
        return Arriving(
            partial(self._pixels, host),
            torch.from_numpy(labels),
            torch.from_numpy(weights),
            host.ids.copy(),
            host.visits.copy(),
            host.bad,
            host.capacity,
        )

    @contextmanager
    def _pixels(self, host: HostBatch) -> Iterator[Tensor]:
        give_back = host.keep()
        yield torch.from_numpy(host.images_BHWC)
        give_back()

    def settle(self) -> None:
        pass


@dataclass
class _Buffer:
    """Memory for the pixels of a batch, used in turns."""

    pixels_BHWC: Tensor | None = None
    used: torch.cuda.Event | None = None
    """When the trainer's stream is done with what is in it."""

    def like(self, pixels_BHWC: Tensor, device: torch.device) -> Tensor:
        count, *shape = pixels_BHWC.shape
        held = self.pixels_BHWC
        if held is None or len(held) < count or held.shape[1:] != pixels_BHWC.shape[1:]:
            self.pixels_BHWC = held = torch.empty(count, *shape, dtype=torch.uint8, device=device)
        return held[:count]


class UnderWay:
    """What is to be done on the host when work on a stream has got so far."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def add(self, event: torch.cuda.Event, then: Callable[[], None]) -> None:
        self._waiting.append((event, then))

    def settle(self) -> None:
        """Do what is due. Waits for all but the newest, so that the host runs no further ahead."""
        while self._waiting and (len(self._waiting) > AHEAD or self._is_done()):
            event, then = self._waiting.popleft()
            event.synchronize()
            then()

    def _is_done(self) -> bool:
        """The oldest."""
        return bool(self._waiting[0][0].query())  # type: ignore[no-untyped-call]


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all feeds: memory that was taken on a stream is used again on it alone."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class OnStream:
    """Copies on a stream of their own, beside the stream that the trainer computes on."""

    ahead = AHEAD

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copy_stream(device)
        self._buffers = deque(_Buffer() for _ in range(AHEAD + 1))
        self._copying = UnderWay()
        self.settle = self._copying.settle

    def start(self, host: HostBatch) -> Arriving:
        """Returns at once: what is on its way must not change before `settle` gives it back."""
        give_back = host.keep()
        buffer = self._buffers[0]
        self._buffers.rotate()
        with torch.cuda.stream(self._stream):
            if buffer.used is not None:  # before its memory is written over, or another's if freed
                self._stream.wait_event(buffer.used)
            on_host = torch.from_numpy(host.images_BHWC)
            pixels_BHWC = buffer.like(on_host, self._device)
            pixels_BHWC.copy_(on_host, non_blocking=True)
            labels, weights = (
                torch.from_numpy(column).to(self._device, non_blocking=True)
                for column in (host.labels, host.weights)
            )
            copied = self._stream.record_event()
        self._copying.add(copied, give_back)
        tensors = (pixels_BHWC, labels, weights)
        return Arriving(
            partial(self._pixels, buffer, tensors, copied),
            labels,
            weights,
            host.ids.copy(),
            host.visits.copy(),
            host.bad,
            host.capacity,
        )

    @contextmanager
    def _pixels(
        self, buffer: _Buffer, tensors: tuple[Tensor, ...], copied: torch.cuda.Event
    ) -> Iterator[Tensor]:
        trainer = torch.cuda.current_stream(self._device)
        trainer.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(trainer)  # memory of the other stream, whoever frees it
        yield tensors[0]
        buffer.used = trainer.record_event()


AnyLoader = TypeVar("AnyLoader", bound=LoaderProcess)


def page_locked(loader: AnyLoader, device: torch.device) -> AnyLoader:
    """Let a GPU read the loader's ring by itself, so that the host need not wait for copies.

    On the CPU it stays as it is; also, with a line on stderr, where the system does not allow it.
    """
    if device.type != "cpu":
        loader.closing.enter_context(_locked(loader.memory, device))
    return loader


@contextmanager
def _locked(memory: NDArray[np.uint8], device: torch.device) -> Generator[None, None, None]:
    cudart, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
    failure = cudart.cudaHostRegister(address, memory.nbytes, 0)
    if int(failure):
        reason = cudart.cudaGetErrorString(failure)
        sys.stderr.write(f"trainyard: batches are not page-locked ({reason}): slower copies\n")
        with suppress(RuntimeError):  # else the next kernel would be said to have failed
            torch.ones(1, device=device)
        yield
        return
    yield
    torch.cuda.synchronize(device)  # no copy is under way
    cudart.cudaHostUnregister(address)
