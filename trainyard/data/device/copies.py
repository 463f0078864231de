"""Copies host batches to a device, ahead of the trainer if it is a GPU.

Copies to a GPU run on a CUDA stream of their own, as uint8, from page-locked memory (see
`page_locked`). The memory of a batch returns to the loader once its copy has finished.
"""

import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from trainyard.data.arrays import Bytes
from trainyard.data.batch import COLUMNS, HostArray, HostBatch, PixelBatch, Samples
from trainyard.data.loader.loader import LoaderProcess

AHEAD = 1
"""Number of batches copied to a GPU ahead of the one that the trainer uses."""


class Transfer(Protocol):
    """Copies host batches to a device."""

    ahead: int  # batches that may be in flight while the trainer uses one

    def start(self, host: HostBatch) -> PixelBatch[Tensor]: ...
    def release_finished(self) -> None:
        """Returns memory to the loader; call it before fetching a batch."""

    def release_all(self) -> None:
        """Waits for all copies and returns their memory; call it after the last batch."""


def transfer_to(device: torch.device) -> Transfer:
    """The transfer of batches to a device."""
    return HostTransfer() if device.type == "cpu" else StreamTransfer(device)


class HostTransfer:
    """Batches for a trainer on the CPU, which uses the pixels in the loader's memory."""

    ahead = 0

    def start(self, host: HostBatch) -> PixelBatch[Tensor]:
        samples = host.map(lambda column: torch.from_numpy(column.copy()))
        return moved(host, samples, torch.from_numpy(host.images_BHWC), host.acquire)

    def release_finished(self) -> None:
        pass

    def release_all(self) -> None:
        pass


@dataclass
class _Buffer:
    """Memory for the pixels of a batch; buffers take turns."""

    pixels_BHWC: Tensor | None = None
    used: torch.cuda.Event | None = None
    """Recorded once the trainer's stream no longer needs the contents."""

    def like(self, pixels_BHWC: Tensor, device: torch.device) -> Tensor:
        count, *shape = pixels_BHWC.shape
        held = self.pixels_BHWC
        if held is None or len(held) < count or held.shape[1:] != pixels_BHWC.shape[1:]:
            self.pixels_BHWC = held = torch.empty(count, *shape, dtype=torch.uint8, device=device)
        return held[:count]


class PendingEvents:
    """Host callbacks that run once a CUDA event has completed."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def add(self, event: torch.cuda.Event, then: Callable[[], None]) -> None:
        self._waiting.append((event, then))

    def release_finished(self) -> None:
        """Runs callbacks that are due. Blocks until at most `AHEAD` events are pending."""
        while self._waiting and (len(self._waiting) > AHEAD or self._is_done()):
            self._release()

    def release_all(self) -> None:
        """Runs all callbacks; blocks until their events have completed."""
        while self._waiting:
            self._release()

    def _release(self) -> None:
        event, then = self._waiting.popleft()
        event.synchronize()
        then()

    def _is_done(self) -> bool:
        """True if the oldest event has completed."""
        return bool(self._waiting[0][0].query())  # type: ignore[no-untyped-call]


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The copy stream of all feeds: memory allocated on a stream is reused on it only."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copied_samples(host: Samples[HostArray], device: torch.device) -> Samples[Tensor]:
    """Starts copies of the columns that belong on a device, and copies the others on the host."""
    return Samples(
        **{
            name: torch.from_numpy(column).to(device, non_blocking=True)
            if COLUMNS[name].on_device
            else torch.from_numpy(column.copy())
            for name, column in host.columns().items()
        }
    )


def moved(
    host: HostBatch,
    samples: Samples[Tensor],
    pixels_BHWC: Tensor,
    acquire: Callable[[], Callable[[], None]],
) -> PixelBatch[Tensor]:
    """A batch of the loader with its samples and pixels on the device."""
    facts: dict[str, Any] = {"bad": host.bad, "capacity": host.capacity}
    return PixelBatch(**samples.columns(), images_BHWC=pixels_BHWC, acquire=acquire, **facts)


def wait_for(
    done: torch.cuda.Event, pixels_BHWC: Tensor, samples: Samples[Tensor]
) -> torch.cuda.Stream:
    """The trainer's stream, which waits for what another one makes, and keeps its memory."""
    trainer = torch.cuda.current_stream(pixels_BHWC.device)
    trainer.wait_event(done)
    for name, column in samples.columns().items():
        if COLUMNS[name].on_device:
            column.record_stream(trainer)  # keeps the memory from early reuse
    pixels_BHWC.record_stream(trainer)
    return trainer


class StreamTransfer:
    """Copies batches on a separate stream, beside the trainer's."""

    ahead = AHEAD

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copy_stream(device)
        self._buffers = deque(_Buffer() for _ in range(AHEAD + 1))
        self._copying = PendingEvents()
        self.release_finished = self._copying.release_finished
        self.release_all = self._copying.release_all

    def start(self, host: HostBatch) -> PixelBatch[Tensor]:
        """Starts a copy without waiting. `host` must not change until its memory is released."""
        release = host.acquire()
        buffer = self._buffers[0]
        self._buffers.rotate()
        with torch.cuda.stream(self._stream):
            if buffer.used is not None:  # before its memory is overwritten or freed
                self._stream.wait_event(buffer.used)
            on_host = torch.from_numpy(host.images_BHWC)
            pixels_BHWC = buffer.like(on_host, self._device)
            pixels_BHWC.copy_(on_host, non_blocking=True)
            samples = copied_samples(host, self._device)
            copied = self._stream.record_event()
        self._copying.add(copied, release)

        def acquire() -> Callable[[], None]:
            trainer = wait_for(copied, pixels_BHWC, samples)

            def release() -> None:
                buffer.used = trainer.record_event()

            return release

        return moved(host, samples, pixels_BHWC, acquire)


AnyLoader = TypeVar("AnyLoader", bound=LoaderProcess)


def page_locked(loader: AnyLoader, device: torch.device) -> AnyLoader:
    """Page-locks the loader's ring, so that the host does not wait for copies to a GPU.

    Does nothing on the CPU; if the system refuses, prints a line on stderr and goes without.
    """
    if device.type != "cpu":
        loader.closing.enter_context(_locked(loader.memory, device))
    return loader


@contextmanager
def _locked(memory: Bytes, device: torch.device) -> Generator[None, None, None]:
    cudart, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
    failure = cudart.cudaHostRegister(address, memory.nbytes, 0)
    if int(failure):
        reason = cudart.cudaGetErrorString(failure)
        sys.stderr.write(f"trainyard: batches are not page-locked ({reason}): slower copies\n")
        with suppress(RuntimeError):  # clears the error, which the next kernel would report
            torch.ones(1, device=device)
        yield
        return
    yield
    torch.cuda.synchronize(device)  # waits for pending copies
    cudart.cudaHostUnregister(address)
