"""What averaging.py compares: a model that has a real one's parameters, and steps of training it.

Of the model's modules, those that have any parameters of their own sleep in the forward and in the
backward pass, as a host does whose accelerator computes, and give their parameters p the gradient
p - rank, that of a quadratic. So the mean of the replicas' weights after so many steps is known.
"""

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

COMPUTE_S = 0.25  # a third of it forward
LR, MOMENTUM = 0.01, 0.9


# --- the model ---


class Work(torch.autograd.Function):
    """What a module does: it sleeps, and has a gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, seconds: float, rank: int, *parameters: Tensor) -> Tensor:
        ctx.seconds, ctx.rank = seconds, rank
        ctx.save_for_backward(*parameters)
        time.sleep(seconds / 3)
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds * 2 / 3)
        scale = gradients[0][:, 0].sum()
        target = -ctx.rank * scale
        parts = [torch.add(target, p, alpha=float(scale)) for p in ctx.saved_tensors]
        return gradients[0], None, None, *parts


def real_model(name: str) -> nn.Module:
    """One of timm's, without memory."""
    import timm

    with torch.device("meta"):
        model: nn.Module = timm.create_model(name)
    return model


class Shaped(nn.Module):
    """The parameters of one of timm's models; logits[B, 2], of which the first is the loss."""

    def __init__(self, name: str, rank: int, seconds: float) -> None:
        super().__init__()
        modules = real_model(name).modules()
        owners = [list(module.parameters(recurse=False)) for module in modules]
        blocks = [nn.ParameterList(torch.full(p.shape, -1.0) for p in own) for own in owners if own]
        self.blocks = nn.ModuleList(blocks)  # which registers them
        self._blocks = [list(block) for block in blocks]
        self._rank, self._seconds = rank, seconds / len(blocks)

    def forward(self, images: Tensor) -> Tensor:
        logits, work = images.flatten(1).expand(-1, 2), cast(Any, Work.apply)
        for block in self._blocks:
            logits = work(logits, self._seconds, self._rank, *block)
        return logits


def expected_error(steps: int) -> float:
    """How far from their minimum weights are after so many steps, of 1 at first."""
    error, velocity = 1.0, 0.0
    for _ in range(steps):
        velocity = MOMENTUM * velocity + error
        error -= LR * velocity
    return error


# --- the contenders: each makes, of a model, a function that takes a step ---

Step = Callable[[], None]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LR, momentum=MOMENTUM, fused=True)


def ddp_alone(model: nn.Module, *, halves: bool = False) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if halves:
        wrapped.register_comm_hook(None, bf16_compress_hook)
    optimizer, images = sgd(model.parameters()), torch.zeros(2, 1)

    def step() -> None:
        wrapped(images)[:, 0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def decent_dp(model: nn.Module) -> Step:
    import_module("loguru").logger.remove()
    wrapped = import_module("decent_dp.ddp").DecentralizedDataParallel(
        model, lambda named: sgd([p for _, p in named]), topology="one-peer-exp"
    )
    images = torch.zeros(2, 1)
    return lambda: wrapped(images)[:, 0].mean().backward()


def trainyard(model: nn.Module, **average: Any) -> Step:
    """With no averager: as many virtual ranks as hosts."""
    from trainyard.averaging.base import Averager
    from trainyard.averaging.config import AverageConfig
    from trainyard.averaging.virtual_ranks import VirtualRanks
    from trainyard.data.batch import Batch
    from trainyard.run.build import averager_class
    from trainyard.training.buffers import Buffers
    from trainyard.training.step import Passes, TrainStep
    from trainyard.training.update import LossScale, Update, no_clip
    from trainyard.training.virtual_ranks import VirtualRanksStep
    from trainyard.world import World

    rank = dist.get_rank()
    hosts = dist.get_world_size()
    world = World(rank=rank, size=hosts, node=rank, num_nodes=hosts)
    averager: Averager = VirtualRanks(hosts, world)
    if average:
        averager = averager_class(average["name"])(AverageConfig(**average), world)
    wrapped = averager.wrap(model)
    update = Update(
        model,
        sgd(model.parameters()),
        LossScale(torch.device("cpu")),
        clip=no_clip,
    )
    passes = Passes(
        model=wrapped,
        averager=averager,
        loss=lambda logits, batch: logits[:, 0],
        autocast=None,
        graphs=False,
        seed=0,
        world=world,
    )
    parts: Any = {
        "passes": passes,
        "buffers": Buffers(model),
        "set_rates": lambda rates: None,
        "update": update,
        "update_ema": lambda step: None,
    }
    if isinstance(averager, VirtualRanks):
        take: TrainStep = VirtualRanksStep(**parts, averager=averager)
    else:
        take = TrainStep(**parts)
    numbers, labels, ones = count(), torch.zeros(2, dtype=torch.long), torch.ones(2)
    batch = Batch(
        ids=labels,
        epochs=labels,
        labels=labels,
        weights=ones,
        images_BCHW=torch.zeros(2, 1),
        mixed_labels=labels,
        lam=ones,
    )

    def step() -> None:
        take(batch, next(numbers), None)

    return step


GOSSIP: dict[str, Any] = {"name": "gossip", "topology": "one-peer-exponential"}
PERIODS = {"our periodic": 16, "our periodic, every 2 steps": 2}
"""Steps, of which one differs from the others."""
CONTENDERS: dict[str, Callable[[nn.Module], Step]] = {
    "DDP alone": ddp_alone,
    "our all-reduce": partial(trainyard, name="allreduce"),
    "our virtual ranks": trainyard,
    "decent-dp": decent_dp,
    "our gossip": partial(trainyard, **GOSSIP),
    "DDP alone, bf16": partial(ddp_alone, halves=True),
    "our gossip, bf16": partial(trainyard, **GOSSIP, compress="bf16"),
    "our gossip, no overlap": partial(trainyard, **GOSSIP, overlap=False),
    **{name: partial(trainyard, name="periodic", every=every) for name, every in PERIODS.items()},
}
OVERLAPPED = ("decent-dp", "our gossip", "our gossip, bf16")
SLOW_ONLY = ("DDP alone, bf16", "our gossip, bf16", "our periodic")
OPTIONAL = ("our gossip, no overlap", "our periodic, every 2 steps")
