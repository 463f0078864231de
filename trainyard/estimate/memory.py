"""Memory of each GPU, and bytes of a checkpoint."""

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from trainyard.averaging.config import AverageConfig
from trainyard.config import RunConfig
from trainyard.image_size import height_width
from trainyard.optim.config import OptimConfig
from trainyard.optim.groups import parameter_groups
from trainyard.optim.optimizers import build_optimizer
from trainyard.training.precision import AUTOCASTS

_NUMBER = 4  # bytes per weight: weights and moments are float32
_CONTEXT = 1.5e9  # CUDA, cuBLAS, cuDNN and NCCL; assumed
_SLACK = 1.15  # gradients of activations, and fragmentation; assumed
_FEW, _MORE = 2, 8  # images


class Sizes(NamedTuple):
    """Bytes of a whole model and its optimizer."""

    weights: float  # with buffers, as saved
    gradients: float
    moments: float
    average: float  # of the weights (EMA), all of several
    on_host: float  # part of the above in host memory


@dataclass(frozen=True)
class Memory:
    """Memory of a GPU."""

    parts: dict[str, float]  # bytes
    micro: int  # images at a time
    largest: int | None  # that fits; None if the memory is not known

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """True if the memory is not known, too."""
        return self.largest is None or self.micro <= self.largest


def model_sizes(model: nn.Module, config: RunConfig) -> Sizes:
    """Sizes from a model, which may be on the meta device."""
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    moments, trained = 0.0, 0
    for group in parameter_groups(model, config.optim):
        numbers = sum(parameter.numel() for parameter in group["params"])
        trained += numbers
        moments += numbers * _moments_per_weight(config.optim, group.get("use_muon", True))
    average = weights * len(config.model.averages)
    return Sizes(
        weights=weights,
        gradients=_NUMBER * trained,
        moments=_NUMBER * moments,
        average=average,
        on_host=average if config.model.ema_cpu else 0,
    )


@cache
def _moments_per_weight(config: OptimConfig, is_matrix: bool = True) -> float:
    """Numbers that an optimizer keeps for a weight, counted after a step of a small layer.

    `is_matrix`: of parameters that muon updates, not its AdamW.
    """
    layer = nn.Linear(64 if is_matrix else 1, 64, bias=False)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer = build_optimizer(layer, OptimConfig(name=config.name, momentum=config.momentum))
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in kept if isinstance(value, Tensor) and value.dim()]
    return sum(tensor.numel() for tensor in tensors) / layer.weight.numel()


def kept_bytes(model: nn.Module, config: RunConfig) -> tuple[float, float]:
    """Bytes that autograd keeps for the backward pass: per image, and besides (cast weights).

    Nothing is computed: tensors with shapes but without numbers pass through the model, which stays
    unchanged, with 2 and with 8 images.
    """
    few, more = (_kept(model, config, images) for images in (_FEW, _MORE))
    slope = (more - few) / (_MORE - _FEW)
    return slope, max(few - _FEW * slope, 0.0)


def _kept(model: nn.Module, config: RunConfig, images: int) -> int:
    dtype = AUTOCASTS[config.batch.precision]
    kept: dict[int, Any] = {}  # storages, alive so that their addresses stay unique

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with FakeTensorMode(), torch.compiler.set_stance("force_eager"):
        tensors = chain(model.named_parameters(), model.named_buffers())
        of_model = {name: _like(tensor) for name, tensor in tensors}
        size = height_width(config.data.image_size)
        batch = torch.empty(images, config.data.channels, *size)
        batch = batch.to(memory_format=torch.channels_last)
        # CPU autocast casts like that of GPUs, except for norms of half-precision numbers.
        with (
            torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            scores = functional_call(model, of_model, (batch,))
            cross_entropy(scores.float(), torch.zeros(images, dtype=torch.long))
    for tensor in of_model.values():
        kept.pop(tensor.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


def _like(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return empty.requires_grad_(tensor.requires_grad)


def gpu_memory(
    sizes: Sizes,
    kept: tuple[float, float],
    config: RunConfig,
    *,
    gpus: int,
    share: int,
    capacity: float | None,
) -> Memory:
    """Memory of each of `gpus` GPUs, with `share` images of a batch on each.

    `kept`: of `kept_bytes`. Without `batch.micro` of a recipe, the whole share is halved until it
    fits, as in a run, but not for a sharded model. The largest size is 0 if the weights alone do
    not fit.
    """
    average, limit = config.average, config.batch.micro
    micro = share if limit == "auto" else min(share, limit)
    parts = gpus if average.name == "sharded" else 1
    adds_whole = micro < share and average.accumulate != "parts"
    held = {
        "weights": sizes.weights / parts,
        "gradients": sizes.gradients / (1 if adds_whole else parts),
        "moments": sizes.moments / parts,
        "average": (sizes.average - sizes.on_host) / parts,
        "exchange": _exchange(sizes, average) if gpus > 1 else 0.0,
        "context": _CONTEXT,
    }
    image, cast = _SLACK * kept[0], kept[1]
    largest = None
    if capacity is not None:
        largest = max(int((capacity - sum(held.values()) - cast) / image), 0)
    is_sought = limit == "auto" and average.name != "sharded"
    while is_sought and largest is not None and micro > max(largest, 1):
        micro = -(-micro // 2)
    return Memory(held | {"activations": image * micro + cast}, micro, largest)


def _exchange(sizes: Sizes, average: AverageConfig) -> float:
    """Bytes of flat copies: of the weights for gossip; anchor, changes, their mean for periodic."""
    if average.name == "sharded":
        return 0.1 * sizes.weights  # the gathered blocks; assumed
    copies = {"gossip": 1, "periodic": 3}.get(average.name, 0)
    return (copies + bool(average.outer_momentum)) * sizes.gradients


def checkpoint_bytes(sizes: Sizes, average: AverageConfig, *, ranks: int) -> float:
    """Bytes of one checkpoint. Replicas that differ each save their weights and moments."""
    written = sizes.weights + sizes.moments + sizes.average
    if average.name in ("gossip", "periodic") and ranks > 1:
        written += ranks * (sizes.weights + sizes.moments) - sizes.moments
    return written
