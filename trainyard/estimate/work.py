"""The operations of a training step, with the bytes that they move and keep.

A step is traced twice, with 2 and with 8 images, on fake tensors that have shapes but no numbers;
costs per image and per step follow from the difference.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Kind = Literal["matrix", "convolution", "grouped", "other"]
_FEW, _MORE = 2, 8  # images


class Operation(NamedTuple):
    """A kernel of the forward or backward pass; FLOPs count two for a multiply-add."""

    kind: Kind
    flops: float  # per image
    image_bytes: float  # read and written, per image
    step_bytes: float  # read and written per step, for weights


class Work(NamedTuple):
    """A training step without its update."""

    operations: tuple[Operation, ...]
    image_size: int
    kept_bytes: float  # activations kept for the backward pass, per image
    cast_bytes: float  # other kept bytes: weights in another precision

    @property
    def flops(self) -> float:
        """FLOPs per image, forward and backward."""
        return sum(operation.flops for operation in self.operations)


class _Pass(NamedTuple):
    rows: list[tuple[Kind, float, float]]  # kind, FLOPs, bytes
    kept: float


def build_work(model: "nn.Module", image_size: int, dtype: "torch.dtype | None") -> Work:
    """The work of a model in training, on any device; the model stays unchanged.

    `dtype`: of the autocast; None for float32 throughout. Nothing is computed.
    """
    few, more = (_trace(model, images, image_size, dtype) for images in (_FEW, _MORE))
    operations = []
    for (kind, *fewer), (_, *larger) in zip(few.rows, more.rows, strict=True):
        (flops, _), (image_bytes, step_bytes) = map(_line, fewer, larger)
        operations.append(Operation(kind, flops, image_bytes, step_bytes))
    return Work(tuple(operations), image_size, *_line(few.kept, more.kept))


def _line(few: float, more: float) -> tuple[float, float]:
    """The part per image, and the constant part."""
    slope = (more - few) / (_MORE - _FEW)
    return slope, max(few - _FEW * slope, 0.0)


def _trace(model: "nn.Module", images: int, image_size: int, dtype: "torch.dtype | None") -> _Pass:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call
    from torch.nn.functional import cross_entropy

    class Step(torch.nn.Module):
        """A module, so that recomputed activations find the same weights."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: "Tensor", labels: "Tensor") -> None:
            # CPU autocast casts like that of GPUs, except for norms of half-precision numbers.
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = cross_entropy(self.model(batch).float(), labels)
            # `backward` would copy those gradients that another thread holds at that moment, as
            # the watchdog does when it looks at frames: the two traces would differ.
            torch.autograd.grad(loss, [each for each in self.parameters() if each.requires_grad])

    step = Step()
    with FakeTensorMode():
        tensors = chain(step.named_parameters(), step.named_buffers())
        shadow = {name: _like(tensor) for name, tensor in tensors}
        own = {tensor.untyped_storage()._cdata for tensor in shadow.values()}
        batch = torch.empty(images, 3, image_size, image_size)
        batch = batch.to(memory_format=torch.channels_last)
        labels = torch.zeros(images, dtype=torch.long)
        rows: list[tuple[Kind, float, float]] = []
        with _recorded(rows), _keeping(own) as kept:
            functional_call(step, shadow, (batch, labels))
    return _Pass(rows, sum(kept.values()))


def _like(tensor: "Tensor") -> "Tensor":
    import torch

    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return empty.requires_grad_(tensor.requires_grad)


@contextmanager
def _keeping(own: set[int]) -> Iterator[dict[int, int]]:
    """Yields the bytes of each storage that autograd keeps, without those in `own`."""
    import torch

    kept: dict[int, int] = {}
    held: list[Any] = []  # keeps storages alive, so that their addresses stay unique

    def pack(tensor: "Tensor") -> "Tensor":
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            held.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@contextmanager
def _recorded(rows: list[tuple[Kind, float, float]]) -> Iterator[None]:
    """Record each operation that runs, without views and empty tensors."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            row = _row(func, args, kwargs or {}, result)
            if row is not None:
                rows.append(row)
            return result

    with Recorder():  # type: ignore[no-untyped-call]
        yield


def _row(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Kind, float, float] | None:
    name = func._overloadpacket.__name__
    given, made = _tensors((args, kwargs)), _tensors(result)
    inputs = {tensor.untyped_storage()._cdata for tensor in given}
    is_view = not func._schema.is_mutable and all(
        tensor.untyped_storage()._cdata in inputs for tensor in made
    )
    if is_view or "empty" in name:
        return None
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
    if "convolution" in name:
        weight, passes = (args[1], 1) if name == "convolution" else (args[2], sum(args[-1][:2]))
        moved = made[0] if name == "convolution" else args[0]
        flops = 2.0 * passes * moved.numel() * weight.numel() / weight.shape[0]
        groups = args[8] if name == "convolution" else args[9]
        return "convolution" if groups == 1 else "grouped", flops, num_bytes
    return *_matrix_flops(func, args, kwargs, result), num_bytes


def _matrix_flops(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Kind, float]:
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return "other", 0.0
    return "matrix", float(count(*args, **kwargs, out_val=result))


def _tensors(tree: Any) -> list["Tensor"]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
