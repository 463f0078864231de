"""The parts of a run that its recipe alone decides, built before its directory is touched."""

from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from torch import nn

from trainyard.averaging.base import Averager
from trainyard.config import RunConfig
from trainyard.course import Course
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import Datasets
from trainyard.data.order import Order, training_order
from trainyard.distributed import Heartbeat
from trainyard.files import RunDirectory
from trainyard.monitor.clock import Clock
from trainyard.monitor.profiler import check_window
from trainyard.optim.schedules import Schedule
from trainyard.run.build import (
    adapt_to_images,
    build_averager,
    build_data,
    build_feeds,
    build_run_course,
    build_run_model,
    build_run_schedule,
    check_batch_norm,
    check_batches,
    check_decoding,
    check_extra_transform,
)
from trainyard.run.labels import check_labels
from trainyard.run.loggers import check_trackers
from trainyard.run.loss import build_run_loss, files_of_loss
from trainyard.run.pretrained import (
    InitialWeights,
    put_initial_weights,
    resumed_weights,
    with_pixels,
)
from trainyard.run.probe import put_probe
from trainyard.run.resume import is_new_run
from trainyard.training.precision import use_precision, use_same_kernels
from trainyard.training.step import Loss
from trainyard.world import World, check_devices, pick_device, seed_generators, together


@dataclass(frozen=True, kw_only=True)
class Parts:
    """On this rank."""

    config: RunConfig
    """With the pixels of its initial weights."""
    folder: RunDirectory
    world: World
    device: torch.device
    averager: Averager
    data: Datasets
    order: Order
    course: Course
    schedule: Schedule
    model: nn.Module
    initial: InitialWeights
    loss: Loss
    loss_files: dict[str, str]
    """See files_of_loss."""
    clock: Clock = field(default_factory=Clock)
    """Starts before environment.json tells how long the start took: no second is in neither."""


def build_parts(
    config: RunConfig,
    folder: RunDirectory,
    world: World,
    *,
    console: Console,
    heartbeat: Heartbeat,
) -> Parts:
    """The parts, in their order. A TrainyardError, on all ranks, if a recipe cannot be built."""
    device = pick_device(world)
    if config.batch.virtual_ranks:
        use_same_kernels(device)
    use_precision(config.batch.precision)
    check_devices(world, device)
    averager = build_averager(config, world, device)
    data = build_data(config, world, console, heartbeat)
    is_new = is_new_run(config.run.resume, folder, world)
    with together(world):
        classes = data.train.classes
        order = training_order(
            config.data, data.train, global_batch=config.batch.size, seed=config.run.seed
        )
        course = build_run_course(config, order.epoch_samples)
        _check(config, data, course, averager, world=world, device=device)
        schedule = build_run_schedule(config, course)
        seed_generators(config.run.seed, device)  # the same first weights on every rank
        model = build_run_model(config, len(classes))
        check_batch_norm(config, model, course, world)
        if is_new:
            initial = put_initial_weights(config.model, model, classes)
        else:
            initial = resumed_weights(config.run.resume, folder)
        config = with_pixels(config, initial)
        if is_new and config.model.checkpoint is None:
            adapt_to_images(config, model, data.train, course=course, device=device)
        loss = build_run_loss(config, data.train, course=course, device=device)
        loss_files = files_of_loss(config.loss)
        model = model if averager.moves_model else model.to(device)
    if is_new and config.model.linear_probe:
        assert isinstance(data.train, Index)  # config.py refuses it for a stream
        feeds = build_feeds(config, world, device)
        about = put_probe(config, model, data.train, feeds, console=console, heartbeat=heartbeat)
        initial = replace(initial, log=[*initial.log, about])
    return Parts(
        config=config,
        folder=folder,
        world=world,
        device=device,
        averager=averager,
        data=data,
        order=order,
        course=course,
        schedule=schedule,
        model=model,
        initial=initial,
        loss=loss,
        loss_files=loss_files,
    )


def _check(
    config: RunConfig,
    data: Datasets,
    course: Course,
    averager: Averager,
    *,
    world: World,
    device: torch.device,
) -> None:
    check_labels(config, data)
    check_batches(config, course, world, averager.waits_in_forward)
    check_decoding(config, device)
    check_extra_transform(config, data.train, device)
    check_window(config.watch.profile, course.num_steps)
    check_trackers(config.watch, world)
