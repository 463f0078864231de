"""Compute time of a GPU: the operations of a training step, and a roofline over them.

A step is traced twice, with 2 and with 8 images, on fake tensors that have shapes but no numbers;
costs per image and per step follow from the difference. Each operation then takes as long as its
arithmetic or its memory traffic, whichever takes longer. Three numbers are the reached shares of
the data sheet. They are the same for all models and GPUs, and fitted to published throughputs by
benchmarks/published.py; docs/estimate.md has their errors.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainyard.errors import InputError
from trainyard.hardware import Accelerator
from trainyard.image_size import ImageSize, height_width, num_pixels

Kind = Literal["matrix", "convolution", "grouped", "other"]
ComputeBound = Literal["arithmetic", "memory traffic", "kernel launches"]

_FEW, _MORE = 2, 8  # images
_LAUNCH = 5e-6  # seconds that PyTorch takes to launch a kernel
# Share of the traffic between matrix products that torch.compile leaves; from one figure alone.
_FUSED = 0.7


# --- the work of a model ---


class Operation(NamedTuple):
    """A kernel of the forward or backward pass; FLOPs count two for a multiply-add."""

    kind: Kind
    flops: float  # per image
    image_bytes: float  # read and written, per image
    step_bytes: float  # read and written per step, for weights


class TrainingWork(NamedTuple):
    """A training step without its update."""

    operations: tuple[Operation, ...]
    image_size: ImageSize
    kept_bytes: float  # activations kept for the backward pass, per image
    cast_bytes: float  # other kept bytes: weights in another precision

    @property
    def flops(self) -> float:
        """FLOPs per image, forward and backward."""
        return sum(operation.flops for operation in self.operations)


def trace_training(
    model: nn.Module, image_size: ImageSize, dtype: torch.dtype | None, channels: int = 3
) -> TrainingWork:
    """The work of a model in training, on any device; the model stays unchanged.

    `dtype`: of the autocast; None for float32 throughout. Nothing is computed.
    """
    shape = (channels, *height_width(image_size))
    few, more = (_trace(model, (images, *shape), dtype) for images in (_FEW, _MORE))
    operations = []
    for (kind, *fewer), (_, *larger) in zip(few.rows, more.rows, strict=True):
        (flops, _), (image_bytes, step_bytes) = map(_line, fewer, larger)
        operations.append(Operation(kind, flops, image_bytes, step_bytes))
    return TrainingWork(tuple(operations), image_size, *_line(few.kept, more.kept))


def _line(few: float, more: float) -> tuple[float, float]:
    """The part per image, and the constant part."""
    slope = (more - few) / (_MORE - _FEW)
    return slope, max(few - _FEW * slope, 0.0)


class _Trace(NamedTuple):
    rows: list[tuple[Kind, float, float]]  # kind, FLOPs, bytes
    kept: float  # bytes


def _trace(model: nn.Module, shape: tuple[int, int, int, int], dtype: torch.dtype | None) -> _Trace:
    step = _Step(model, dtype)
    with FakeTensorMode():
        tensors = chain(step.named_parameters(), step.named_buffers())
        fakes = {name: _like(tensor) for name, tensor in tensors}
        own = {tensor.untyped_storage()._cdata for tensor in fakes.values()}
        batch = torch.empty(shape).to(memory_format=torch.channels_last)
        labels = torch.zeros(shape[0], dtype=torch.long)
        with _Recorder() as recorder, _keeping(own) as kept:
            functional_call(step, fakes, (batch, labels))
    return _Trace(recorder.rows, sum(kept.values()))


class _Step(nn.Module):
    """Forward and backward pass; a module, so that recomputed activations find the same weights."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, batch: Tensor, labels: Tensor) -> None:
        # CPU autocast casts like that of GPUs, except for norms of half-precision numbers.
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
            loss = cross_entropy(self.model(batch).float(), labels)
        # `backward` would copy those gradients that another thread holds at that moment, as
        # the watchdog does when it looks at frames: the two traces would differ.
        torch.autograd.grad(loss, [each for each in self.parameters() if each.requires_grad])


def _like(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return empty.requires_grad_(tensor.requires_grad)


@contextmanager
def _keeping(own: set[int]) -> Iterator[dict[int, int]]:
    """Yields the bytes of each storage that autograd keeps, without those in `own`."""
    kept: dict[int, int] = {}
    held: list[Any] = []  # keeps storages alive, so that their addresses stay unique

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            held.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


class _Recorder(TorchDispatchMode):
    """Records each operation that runs, without views and empty tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[tuple[Kind, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(result)
        if not _is_view(func, given, made) and "empty" not in func._overloadpacket.__name__:
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
            self.rows.append((*_flops(func, args, kwargs, result), num_bytes))
        return result


def _is_view(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    inputs = {tensor.untyped_storage()._cdata for tensor in given}
    return not func._schema.is_mutable and all(
        tensor.untyped_storage()._cdata in inputs for tensor in made
    )


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Kind, float]:
    """Kind and FLOPs. torch counts too many for the backward pass of a grouped convolution."""
    name = func._overloadpacket.__name__
    if "convolution" in name:
        is_forward = name == "convolution"
        weight, groups = (args[1], args[8]) if is_forward else (args[2], args[9])
        moved, passes = (result, 1) if is_forward else (args[0], sum(args[-1][:2]))
        flops = 2.0 * passes * moved.numel() * weight.numel() / weight.shape[0]
        return "convolution" if groups == 1 else "grouped", flops
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return "other", 0.0
    return "matrix", float(count(*args, **kwargs, out_val=result))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# --- the time of a GPU ---


class Efficiency(NamedTuple):
    """Reached shares of the data sheet."""

    matrix: float = 0.55
    convolution: float = 0.75
    bandwidth: float = 0.75


class MicroStep(NamedTuple):
    """Seconds of a micro-step by part; kernels are launched while others run."""

    arithmetic: float  # kernels bound by arithmetic
    traffic: float  # other kernels, bound by memory traffic
    launches: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic + self.traffic, self.launches)

    @property
    def bound(self) -> ComputeBound:
        if self.launches > self.arithmetic + self.traffic:
            return "kernel launches"
        return "arithmetic" if self.arithmetic > self.traffic else "memory traffic"


@dataclass(frozen=True)
class Roofline:
    """The throughput of a GPU, estimated from its data sheet."""

    work: TrainingWork
    device: Accelerator
    precision: str
    images: int
    """Micro-batch size, in images of `work.image_size`."""
    update_bytes: float
    """Bytes read and written by an update: weights, gradients and moments."""
    compiled: bool = False
    efficiency: Efficiency = field(default_factory=Efficiency)

    def compute(self, images: int, image_size: ImageSize) -> float:
        """Seconds of a step: forward, backward and update."""
        area = num_pixels(image_size) / num_pixels(self.work.image_size)
        count = math.ceil(images * area / self.images)
        micro_step = self.micro_step(images * area / count)
        return count * micro_step.seconds + self.update_bytes / self._bandwidth

    def micro_step(self, images: float) -> MicroStep:
        """Forward and backward pass of some images of `work.image_size`."""
        arithmetic = traffic = 0.0
        for operation in self.work.operations:
            computed = operation.flops * images / self._peak(operation)
            moved = self._bytes(operation, images) / self._bandwidth
            if computed > moved:
                arithmetic += computed
            else:
                traffic += moved
        launches = 0.0 if self.compiled else _LAUNCH * len(self.work.operations)
        return MicroStep(arithmetic, traffic, launches)

    def bound(self, images: int) -> ComputeBound:
        """The bottleneck of a step of `images` images."""
        return self.micro_step(min(images, self.images)).bound

    def _bytes(self, operation: Operation, images: float) -> float:
        num_bytes = operation.image_bytes * images + operation.step_bytes
        return _FUSED * num_bytes if self.compiled and operation.kind == "other" else num_bytes

    def _peak(self, operation: Operation) -> float:
        if operation.kind == "matrix":
            return self.efficiency.matrix * peak_flops(self.device, self.precision)
        # Grouped convolutions do not run on tensor cores.
        precision = "fp32" if operation.kind == "grouped" else self.precision
        return self.efficiency.convolution * peak_flops(self.device, precision)

    @property
    def _bandwidth(self) -> float:
        return self.efficiency.bandwidth * self.device.bandwidth


def peak_flops(device: Accelerator, precision: str) -> float:
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
