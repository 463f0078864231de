"""The parts of a run that a recipe's sections name, built."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.base import Averager
from trainyard.config import RunConfig
from trainyard.course import Course, build_course
from trainyard.data.datasets import Feeds
from trainyard.model.build import build_model
from trainyard.model.ema import Ema
from trainyard.optim.optimizers import build_optimizer
from trainyard.optim.schedules import Rates, Schedule, build_schedule
from trainyard.train.checkpoint import TrainState
from trainyard.train.losses import build_loss
from trainyard.train.micro import MicroBatchSize
from trainyard.train.step import TrainStep
from trainyard.train.update import (
    Clip,
    DynamicLossScale,
    LossScale,
    Update,
    clip_adaptively,
    clip_by_norm,
    no_clip,
)
from trainyard.world import World

AVERAGERS: dict[str, Callable[[World], Averager]] = {"allreduce": AllReduce}
AUTOCASTS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def course_of(config: RunConfig, epoch_samples: int) -> Course:
    return build_course(
        config.run.length,
        epoch_samples=epoch_samples,
        batch=config.batch.size,
        image_size=config.data.image_size,
        batch_stages=config.schedule.batch_size,
        size_stages=config.schedule.image_size,
    )


def feeds_of(config: RunConfig, world: World, device: torch.device) -> Feeds:
    return Feeds(
        data=config.data,
        augment=config.augment,
        global_batch=config.batch.size,
        seed=config.run.seed,
        channels_last=config.model.channels_last,
        world=world,
        device=device,
    )


def model_of(config: RunConfig, num_classes: int) -> nn.Module:
    return build_model(
        config.model,
        num_classes=num_classes,
        image_size=config.data.image_size,
        eval_size=config.data.eval_size,
    )


def ema_of(config: RunConfig, model: nn.Module) -> Ema | None:
    decay = config.model.ema_decay
    if decay is None:
        return None
    return Ema(model, decay, warmup=config.model.ema_warmup, cpu=config.model.ema_cpu)


def optimizer_of(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, config.optim)


def loss_scale_of(config: RunConfig, device: torch.device) -> LossScale:
    return DynamicLossScale(device) if config.batch.precision == "fp16" else LossScale(device)


def schedule_of(config: RunConfig, course: Course) -> Schedule:
    return build_schedule(
        config.schedule,
        course,
        lr=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        drop_path=config.model.drop_path,
    )


def step_of(
    config: RunConfig,
    state: TrainState,
    wrapped: nn.Module,
    *,
    world: World,
    ema: Ema | None,
    course: Course,
    report: Callable[[str], None],
) -> TrainStep:
    """`wrapped`: the model as the averager wrapped it; `report` hears of smaller micro-batches."""
    logs = course.every(config.run.log_every)
    micro = None if config.batch.micro == "auto" else config.batch.micro
    return TrainStep(
        model=wrapped,
        averager=state.averager,
        loss=build_loss(config.loss, config.augment.label_smoothing, teacher=None),
        micro=MicroBatchSize(micro, report=report),
        autocast=AUTOCASTS[config.batch.precision],
        set_rates=_rate_setter(state.optimizer),
        update=Update(
            state.model,
            state.optimizer,
            state.scale,
            clip=_clip_of(config, state.model),
            measure=lambda step: logs.due(step + 1),
        ),
        follow=ema.update if ema else lambda step: None,
        seed=config.run.seed,
        rank=world.rank,
    )


def _rate_setter(optimizer: torch.optim.Optimizer) -> Callable[[Rates], None]:
    def set_rates(rates: Rates) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rates.lr * group["lr_scale"]
            group["weight_decay"] = rates.weight_decay * group["decay_scale"]

    return set_rates


def _clip_of(config: RunConfig, model: nn.Module) -> Clip:
    if config.optim.clip_norm is not None:
        return clip_by_norm(config.optim.clip_norm)
    if config.optim.clip_agc is not None:
        classifier: Any = model.get_classifier()  # type: ignore[operator]
        return clip_adaptively(config.optim.clip_agc, exempt=list(classifier.parameters()))
    return no_clip
