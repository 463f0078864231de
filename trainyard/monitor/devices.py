"""Utilisation, power and memory of a rank's device."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainyard.hardware import find_accelerator


class DeviceReadings(NamedTuple):
    """Readings of a device; None if not known."""

    memory: int  # bytes: torch's peak on a GPU; on the CPU, of this process
    gpu_use: float | None = None  # share of the last second or less in which the GPU computed
    gpu_power: float | None = None  # watts


class Gauge:
    """Reads a device, NVIDIA GPUs through NVIDIA's library if it is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = _handle(device)

    def read(self) -> DeviceReadings:
        if self._device.type != "cuda":
            return DeviceReadings(_resident())
        memory = torch.cuda.max_memory_allocated(self._device)
        if self._handle is None:
            return DeviceReadings(memory)
        import pynvml

        return DeviceReadings(
            memory,
            _nvml(lambda: pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100),
            _nvml(lambda: pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1000),
        )


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s of a device in dense matrix products; None if not known."""
    if device.type != "cuda":
        return None
    accelerator = find_accelerator(torch.cuda.get_device_name(device))
    return None if accelerator is None else accelerator.peak.get(precision)


def _handle(device: torch.device) -> Any:
    """NVML's handle of a GPU, found by UUID since NVML's index may differ from torch's."""
    if device.type != "cuda":
        return None
    import pynvml

    uuid = torch.cuda.get_device_properties(device).uuid
    _nvml(pynvml.nvmlInit)  # there is no handle without it
    return _nvml(lambda: pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))


def _nvml(query: Callable[[], Any]) -> Any:
    """The answer of NVML; None without it, or for values that a GPU lacks (use of a MIG slice)."""
    import pynvml

    with suppress(pynvml.NVMLError):
        return query()
    return None


def _resident() -> int:
    """Resident memory of this process in bytes; 0 without /proc."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
