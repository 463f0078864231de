"""Memory of each GPU, and disk space of checkpoints."""

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from trainyard.averaging.config import AverageConfig
from trainyard.config import RunConfig
from trainyard.optim.config import OptimConfig

if TYPE_CHECKING:
    from torch import nn

    from trainyard.estimate.compute import TrainingWork

_NUMBER = 4  # bytes per weight: weights and moments are float32
_CONTEXT = 1.5e9  # CUDA, cuBLAS, cuDNN and NCCL; assumed
_SLACK = 1.15  # gradients of activations, and fragmentation; assumed


class Sizes(NamedTuple):
    """Bytes of a whole model and its optimizer."""

    weights: float  # with buffers, as saved
    gradients: float
    moments: float
    average: float  # of the weights (EMA), all of several
    on_host: float  # part of the above in host memory

    @property
    def trained(self) -> float:
        """Number of trained weights."""
        return self.gradients / _NUMBER


class Memory(NamedTuple):
    """Bytes on a GPU."""

    weights: float
    gradients: float
    moments: float
    average: float
    exchange: float  # copies made by the averager
    context: float
    activations: float  # of a micro-batch
    micro: int  # images at a time
    largest: int | None  # that fits; None if the memory is not known

    @property
    def total(self) -> float:
        return sum(self[:7])

    @property
    def fits(self) -> bool:
        """True if the memory is not known, too."""
        return self.largest is None or self.micro <= self.largest


def model_sizes(model: "nn.Module", config: RunConfig) -> Sizes:
    """Sizes from a model, which may be on the meta device."""
    from trainyard.optim.groups import parameter_groups

    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    moments, trained = 0.0, 0
    for group in parameter_groups(model, config.optim):
        numbers = sum(parameter.numel() for parameter in group["params"])
        trained += numbers
        moments += numbers * moments_per_weight(config.optim, group.get("use_muon", True))
    average = weights * len(config.model.averages)
    return Sizes(
        weights=weights,
        gradients=_NUMBER * trained,
        moments=_NUMBER * moments,
        average=average,
        on_host=average if config.model.ema_cpu else 0,
    )


@cache
def moments_per_weight(config: OptimConfig, is_matrix: bool = True) -> float:
    """Numbers that an optimizer keeps for a weight, counted after a step of a small layer.

    `is_matrix`: of parameters that muon updates, not its AdamW.
    """
    import torch
    from torch import nn

    from trainyard.optim.optimizers import build_optimizer

    layer = nn.Linear(64 if is_matrix else 1, 64, bias=False)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer = build_optimizer(layer, OptimConfig(name=config.name, momentum=config.momentum))
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in kept if isinstance(value, torch.Tensor) and value.dim()]
    return sum(tensor.numel() for tensor in tensors) / layer.weight.numel()


def update_bytes(sizes: Sizes, config: RunConfig) -> float:
    """Bytes moved by an update: weights and moments are read and written, gradients read."""
    moved = 3 * sizes.gradients + 2 * sizes.moments
    if config.optim.clip_norm is not None:  # read for the norm, read and written to scale
        moved += 3 * sizes.gradients
    return moved + 3 * (sizes.average - sizes.on_host)


def gpu_memory(
    sizes: Sizes,
    work: "TrainingWork",
    config: RunConfig,
    *,
    ranks: int,
    share: int,
    capacity: float | None,
) -> Memory:
    """Memory of each of `ranks` GPUs, with `share` images of a batch on each.

    Without `batch.micro` of a recipe, the whole share is halved until it fits, as in a run, but not
    for a sharded model. The largest size is 0 if the weights alone do not fit.
    """
    average, asked = config.average, config.batch.micro
    micro = share if asked == "auto" else min(share, asked)
    parts = ranks if average.name == "sharded" else 1
    adds_whole = micro < share and average.accumulate != "parts"
    held = (
        sizes.weights / parts,
        sizes.gradients / (1 if adds_whole else parts),
        sizes.moments / parts,
        (sizes.average - sizes.on_host) / parts,
        _exchange(sizes, average) if ranks > 1 else 0.0,
        _CONTEXT,
    )
    image = _SLACK * work.kept_bytes
    largest = None
    if capacity is not None:
        largest = max(int((capacity - sum(held) - work.cast_bytes) / image), 0)
    is_sought = asked == "auto" and average.name != "sharded"
    while is_sought and largest is not None and micro > max(largest, 1):
        micro = -(-micro // 2)
    return Memory(*held, image * micro + work.cast_bytes, micro, largest)


def _exchange(sizes: Sizes, average: AverageConfig) -> float:
    """Bytes of flat copies: of the weights for gossip; anchor, changes, their mean for periodic."""
    if average.name == "sharded":
        return 0.1 * sizes.weights  # the gathered blocks; assumed
    copies = {"gossip": 1, "periodic": 3}.get(average.name, 0)
    return (copies + bool(average.outer_momentum)) * sizes.gradients


def checkpoint_bytes(sizes: Sizes, average: AverageConfig, *, ranks: int) -> float:
    """Bytes of one checkpoint. Replicas that differ each save their weights and moments."""
    whole = sizes.weights + sizes.moments + sizes.average
    if average.name in ("gossip", "periodic") and ranks > 1:
        whole += ranks * (sizes.weights + sizes.moments) - sizes.moments
    return whole
