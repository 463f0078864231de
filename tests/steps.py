"""Training steps without a run: models, batches and states for tests on one rank or several."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from tests.data.batches import batch_of_images
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.base import Averager
from trainyard.averaging.config import AverageConfig
from trainyard.averaging.sharded import gathered
from trainyard.data.batch import TENSORS, Batch
from trainyard.monitor.clock import Clock
from trainyard.training.buffers import Buffers
from trainyard.training.checkpoint import TrainState
from trainyard.training.config import LossConfig
from trainyard.training.guard import Guard
from trainyard.training.losses import build_loss
from trainyard.training.saver import Saver, path_of
from trainyard.training.step import Passes, TrainStep
from trainyard.training.update import (
    Clip,
    DynamicLossScale,
    LossScale,
    Update,
    clip_by_norm,
    no_clip,
)
from trainyard.world import World

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A training without batch norm, told apart by how a global batch is cut."""

    batch: int = 32
    micro: int | None = None
    bad: tuple[int, ...] = ()  # places in the global batch of samples with weight 0
    autocast: torch.dtype | None = None
    clip_norm: float | None = None
    mixed: bool = False


PLAIN = Case()


def mapped(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    tensors: Any = {name: function(getattr(batch, name)) for name in TENSORS}
    return Batch(**tensors)


def global_batch(case: Case, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(10, (case.batch,), generator=generator)
    images = torch.randn(case.batch, 3, 32, 32, generator=generator)
    images += labels.view(-1, 1, 1, 1) / 10  # something to learn
    mixed_labels, lam = labels, torch.ones(case.batch)
    if case.mixed:
        mixed_labels = labels.roll(1)
        lam = torch.rand(case.batch, generator=generator)
    weights = torch.ones(case.batch)
    weights[list(case.bad)] = 0
    return replace(batch_of_images(images, labels, weights), mixed_labels=mixed_labels, lam=lam)


def share_of(whole: Batch, world: World) -> Batch:
    """A rank's part of a global batch."""
    return mapped(whole, lambda tensor: tensor[world.rank :: world.size])


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("test_vit", num_classes=10, img_size=32)
    return model


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's weights, gathered where each rank has a part; every rank calls."""
    return {key: gathered(tensor.detach()).clone() for key, tensor in module.state_dict().items()}


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector, a copy."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def build_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scale: LossScale | None = None,
    *,
    clip: Clip = no_clip,
    **options: Any,
) -> Update:
    return Update(model, optimizer, scale or LossScale(CPU), clip=clip, **options)


def make_step(
    model: nn.Module,
    averager: Averager | None = None,
    world: World | None = None,
    *,
    lr: float = 0.05,
    case: Case = PLAIN,
    **parts: Any,
) -> TrainStep:
    """A step by SGD with momentum, of which `parts` replace some."""
    world = world or World()
    averager = averager or AllReduce(AverageConfig(), world)
    wrapped = averager.wrap(model)  # a sharded model has other parameters then
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    is_fp16 = case.autocast == torch.float16
    scale = DynamicLossScale(CPU, initial=2.0**8, interval=5) if is_fp16 else LossScale(CPU)
    clip = no_clip if case.clip_norm is None else clip_by_norm(case.clip_norm)
    passes: dict[str, Any] = {
        "model": wrapped,
        "averager": averager,
        "loss": build_loss(LossConfig(), 0.1, teacher=None, mixes=case.mixed),
        "autocast": case.autocast,
        "graphs": False,
        "seed": 0,
        "world": world,
    }
    given: dict[str, Any] = {
        "buffers": Buffers(model),
        "set_rates": lambda rates: None,
        "update": build_update(model, optimizer, scale, clip=clip),
        "update_ema": lambda step: None,
        "micro": case.micro,
    }
    names = {field.name for field in fields(Passes)}
    passes |= {key: value for key, value in parts.items() if key in names}
    given |= {key: value for key, value in parts.items() if key not in names}
    return TrainStep(passes=Passes(**passes), **given)


_ALONE = World()


def save_checkpoint(
    state: TrainState, folder: Path, *, keep: int = 1, world: World = _ALONE
) -> Path:
    """Save a checkpoint and wait for it; call it inside the averager's consensus."""
    all_write = state.averager.replica.total > 1
    with Saver(folder, world, keep=keep, all_write=all_write) as saver:
        saver.save(state)
        saver.wait()
    return path_of(folder, state.step)


def build_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, averager: Averager, **parts: Any
) -> TrainState:
    """What a checkpoint saves, of a run that has made no step."""
    given: dict[str, Any] = {
        "emas": {},
        "scale": LossScale(CPU),
        "guard": Guard(CPU, limit=3),
        "clock": Clock(),
        "classes": ["cat", "dog"],
    }
    return TrainState(model=model, optimizer=optimizer, averager=averager, **(given | parts))
