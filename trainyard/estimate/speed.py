"""Compute time of a GPU, from its data sheet and a model's operations.

Each operation takes as long as its arithmetic or its memory traffic, whichever takes longer: a
roofline for each kernel. Three numbers are the reached shares of the data sheet. They are the same
for all models and GPUs, and fitted to published throughputs by benchmarks/published.py;
docs/estimate.md has their errors.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainyard.errors import InputError
from trainyard.estimate.work import Operation, Work
from trainyard.hardware import Accelerator

Bound = Literal["arithmetic", "memory traffic", "kernel launches"]

_LAUNCH = 5e-6  # seconds that PyTorch takes to launch a kernel
# Share of the traffic between matrix products that torch.compile leaves; from one figure alone.
_FUSED = 0.7


class Efficiency(NamedTuple):
    """Reached shares of the data sheet."""

    matrix: float = 0.55
    convolution: float = 0.75
    bandwidth: float = 0.75


class Parts(NamedTuple):
    """Seconds of a micro-step; kernels are launched while others run."""

    arithmetic: float  # kernels bound by arithmetic
    traffic: float  # other kernels, bound by memory traffic
    launches: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic + self.traffic, self.launches)

    @property
    def bound(self) -> Bound:
        if self.launches > self.arithmetic + self.traffic:
            return "kernel launches"
        return "arithmetic" if self.arithmetic > self.traffic else "memory traffic"


@dataclass(frozen=True)
class Speed:
    """The estimated pace of a GPU."""

    work: Work
    device: Accelerator
    precision: str
    micro: int
    """Micro-batch size, in images of `work.image_size` pixels."""
    update_bytes: float
    """Bytes read and written by an update: weights, gradients and moments."""
    compiled: bool = False
    efficiency: Efficiency = field(default_factory=Efficiency)
    factor: float = 1.0
    """Factor on all times, to see the effect of an error."""

    @property
    def images(self) -> int:
        """A number of images that keeps the GPU busy."""
        return self.micro

    @property
    def image_size(self) -> int:
        return self.work.image_size

    def compute(self, images: int, image_size: int) -> float:
        """Seconds of a step: forward, backward and update."""
        area = (image_size / self.work.image_size) ** 2
        count = math.ceil(images * area / self.micro)
        parts = self.parts(images * area / count)
        return self.factor * (count * parts.seconds + self._update())

    def parts(self, images: float) -> "Parts":
        arithmetic = traffic = 0.0
        for operation in self.work.operations:
            computed = operation.flops * images / self._peak(operation)
            moved = self._bytes(operation, images) / self._bandwidth()
            if computed > moved:
                arithmetic += computed
            else:
                traffic += moved
        launches = 0.0 if self.compiled else _LAUNCH * len(self.work.operations)
        return Parts(arithmetic, traffic, launches)

    def bound(self, images: int) -> Bound:
        """The bottleneck of a step of `images` images."""
        return self.parts(min(images, self.micro)).bound

    def _bytes(self, operation: Operation, images: float) -> float:
        num_bytes = operation.image_bytes * images + operation.step_bytes
        return _FUSED * num_bytes if self.compiled and operation.kind == "other" else num_bytes

    def _peak(self, operation: Operation) -> float:
        if operation.kind == "matrix":
            return self.efficiency.matrix * peak_of(self.device, self.precision)
        if operation.kind == "grouped":  # not on tensor cores
            return self.efficiency.convolution * self.device.peak["fp32"]
        return self.efficiency.convolution * peak_of(self.device, self.precision)

    def _bandwidth(self) -> float:
        return self.efficiency.bandwidth * self.device.bandwidth

    def _update(self) -> float:
        return self.update_bytes / self._bandwidth()


def peak_of(device: Accelerator, precision: str) -> float:
    """Dense FLOP/s. InputError if the device lacks units for a 16-bit precision."""
    if precision == "tf32" and "tf32" not in device.peak:
        precision = "fp32"
    if precision not in device.peak:
        others = [name for name in ("fp16", "bf16") if name in device.peak]
        raise InputError(
            f"batch.precision = {precision!r}: {device.name} has no units for it: set "
            f"--batch.precision {others[0]}"
        )
    return device.peak[precision]
