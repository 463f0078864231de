"""Kernels that work starts on a GPU, and waits of the host for it, counted by torch's profiler."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Calls of CUDA's runtime after which the host has waited for the device.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaLaunchKernelExC")


class Counting:
    """Counts between `start` and `stop`."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def start(self) -> None:
        torch.cuda.synchronize()
        self._profiler.start()

    def stop(self, steps: int) -> dict[str, Any]:
        """Counts a step."""
        self._profiler.stop()
        events: Any = self._profiler.events()  # type: ignore[no-untyped-call]
        names = Counter(event.name for event in events if event.device_type == DeviceType.CPU)
        kernels = sum(event.device_type == DeviceType.CUDA for event in events)
        return {
            "kernels and copies": kernels / steps,
            "launches": sum(map(names.__getitem__, (*_LAUNCHES, "cuLaunchKernelEx"))) / steps,
            "host syncs": sum(map(names.__getitem__, _WAITS)) / steps,
        }


def profiled(work: Callable[[], Any], steps: int, device: torch.device) -> dict[str, Any]:
    """Counts of `work`, a step; nothing on the CPU."""
    if device.type != "cuda":
        return {}
    counting = Counting()
    counting.start()
    work()
    return counting.stop(steps)
