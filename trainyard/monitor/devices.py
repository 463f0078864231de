"""How hard a rank's device works, and how much of its memory is taken."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainyard.hardware import find_accelerator


class Gauged(NamedTuple):
    """None is what is not known."""

    memory: int  # bytes: the most that torch had on the device; on the CPU, this process
    gpu_use: float | None = None  # share of the last second or less in which it computed
    gpu_power: float | None = None  # watts


class Gauge:
    """Reads a device. NVIDIA's library is asked, if it is there, about NVIDIA's GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = _handle(device)

    def read(self) -> Gauged:
        if self._device.type != "cuda":
            return Gauged(_resident())
        memory = torch.cuda.max_memory_allocated(self._device)
        if self._handle is None:
            return Gauged(memory)
        import pynvml

        return Gauged(
            memory,
            _asked(lambda: pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100),
            _asked(lambda: pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1000),
        )


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Of a device per second, in dense matrix products; None if it is not known."""
    if device.type != "cuda":
        return None
    accelerator = find_accelerator(torch.cuda.get_device_name(device))
    return None if accelerator is None else accelerator.peak.get(precision)


def _handle(device: torch.device) -> Any:
    """The library's name for a GPU, whose number there may be another than torch's."""
    if device.type != "cuda":
        return None
    import pynvml

    uuid = torch.cuda.get_device_properties(device).uuid
    _asked(pynvml.nvmlInit)  # without it there is no handle either
    return _asked(lambda: pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))


def _asked(question: Callable[[], Any]) -> Any:
    """None without the library or for a GPU that does not know: a part of one (MIG) no use."""
    import pynvml

    with suppress(pynvml.NVMLError):
        return question()
    return None


def _resident() -> int:
    """Bytes of memory that this process has; 0 where there is no /proc."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
