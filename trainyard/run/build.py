"""The parts of a run, from its recipe, in the order of building."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from trainyard.averaging.base import Averager
from trainyard.averaging.config import AVERAGERS
from trainyard.averaging.topology import KEY as TOPOLOGY
from trainyard.averaging.virtual_ranks import VirtualRanks
from trainyard.config import RunConfig
from trainyard.course import Course, build_course
from trainyard.data.augment.extra import check_extra
from trainyard.data.batch import Batch
from trainyard.data.device import gpu_decode
from trainyard.data.feeds import Feeds
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import Datasets, open_datasets
from trainyard.data.order import Order, training_order
from trainyard.data.stream.shards import Stream
from trainyard.distributed import Heartbeat
from trainyard.errors import RecipeError
from trainyard.files import RunDirectory
from trainyard.image_size import height_width
from trainyard.model.drop_path import drop_path_setter
from trainyard.model.ema import Ema
from trainyard.model.execution import (
    Mode,
    choose_mode,
    compile_in_place,
    has_cuda_graphs,
    keep_compiled_code,
)
from trainyard.monitor.clock import Clock
from trainyard.monitor.profiler import check_window
from trainyard.monitor.progress import counter
from trainyard.optim.config import OptimConfig
from trainyard.optim.groups import classifier_parameters, set_group_rates
from trainyard.optim.optimizers import build_optimizer
from trainyard.optim.schedules import Rates, Schedule, build_schedule
from trainyard.own_code import as_recipe_error, imported, is_own
from trainyard.printable import print_line
from trainyard.run.depth import measure, with_range
from trainyard.run.labels import check_labels, has_lists
from trainyard.run.loggers import check_trackers
from trainyard.run.loss import build_run_loss, files_of_loss
from trainyard.run.metrics import Reporter
from trainyard.run.model import announce_own, build_run_model
from trainyard.run.pretrained import (
    InitialWeights,
    put_initial_weights,
    resumed_weights,
    with_pixels,
)
from trainyard.run.probe import put_probe
from trainyard.run.resume import conditions, is_new_run
from trainyard.training.bn_statistics import batch_norms, estimate_statistics
from trainyard.training.buffers import Buffers
from trainyard.training.checkpoint import TrainState
from trainyard.training.guard import Guard
from trainyard.training.losses import Loss
from trainyard.training.micro import MicroBatchSearch, bytes_of_moments
from trainyard.training.precision import AUTOCASTS, use_precision, use_same_kernels
from trainyard.training.step import Passes, TrainStep, num_parts
from trainyard.training.update import (
    Clip,
    DynamicLossScale,
    LossScale,
    Update,
    clip_adaptively,
    clip_by_norm,
    no_clip,
)
from trainyard.training.virtual_ranks import VirtualRanksStep
from trainyard.world import World, check_devices, pick_device, seed_generators, together

_FIRST_IMAGES = 4096  # that a model which adapts to images sees before the first step
_LAG = 8  # steps that replicas may drift apart if they do not wait for each other


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
    ema: Ema | None = None
    """The moving averages of the weights, if the recipe has any."""
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
    with counter(console, "indexing samples") as show:
        data = open_datasets(config.data, world, heartbeat.counted("indexing", show))
    heartbeat.mark("start")  # the wait for the first rank's index may have been long
    is_new = is_new_run(config.run.resume, folder, world)
    depth = measure(config, data, world, is_new=is_new)
    with together(world):
        classes, size, seed = data.train.classes, config.batch.size, config.run.seed
        order = training_order(config.data, data.train, global_batch=size, seed=seed)
        course = build_run_course(config, order.epoch_samples)
        _check(config, data, course, averager.waits_in_forward, world=world, device=device)
        schedule = build_run_schedule(config, course)
        seed_generators(seed, device)  # the same first weights on every rank
        model = build_run_model(config, len(classes))
        check_batch_norm(config, model, course, world)
        if is_new:
            initial = put_initial_weights(config.model, model, classes)
        else:
            initial = resumed_weights(config.run.resume, folder)
        config = with_range(with_pixels(config, initial), depth, is_new=is_new)
        if is_new and config.model.checkpoint is None:
            adapt_to_images(config, model, data.train, course=course, device=device)
        loss = build_run_loss(config, data.train, course=course, device=device)
        loss_files = files_of_loss(config.loss)
        model = model if averager.moves_model else model.to(device)
    if is_new and config.model.linear_probe:
        assert isinstance(data.train, Index)  # config.py refuses it for a stream
        feeds = build_feeds(config, world, device)
        sentence = put_probe(config, model, data.train, feeds, console=console, heartbeat=heartbeat)
        initial = replace(initial, log=[*initial.log, sentence])
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
        ema=build_ema(config, model),
        loss=loss,
        loss_files=loss_files,
    )


def build_averager(config: RunConfig, world: World, device: torch.device) -> Averager:
    """The averager of a run's replicas."""
    if config.batch.virtual_ranks:
        return VirtualRanks(config.batch.virtual_ranks, world)
    name = config.average.name if world.size > 1 else "allreduce"  # which averages with nobody
    if name == "gossip":
        announce_own(TOPOLOGY, config.average.topology)
    with together(world):
        kind = averager_class(name)
        with as_recipe_error("average.name", name) if is_own(name) else nullcontext():
            return kind.build(config.average, world, device, AUTOCASTS[config.batch.precision])


def averager_class(name: str) -> type[Averager]:
    """The class of an averager by its name, or that of the user's own."""
    if not is_own(name):
        module, _, kind = AVERAGERS[name].partition(":")
        known: type[Averager] = getattr(import_module(f"trainyard.averaging.{module}"), kind)
        return known
    announce_own("average.name", name)
    class_of_user: Any = imported("average.name", name)
    if not (isinstance(class_of_user, type) and issubclass(class_of_user, Averager)):
        raise RecipeError(
            "function.not-averager",
            "{key} = {value!r}: write a class derived from trainyard.Averager, or from one of its "
            "kinds",
            key="average.name",
            value=name,
        )
    return class_of_user


def _check(
    config: RunConfig,
    data: Datasets,
    course: Course,
    in_step: str | None,
    *,
    world: World,
    device: torch.device,
) -> None:
    check_labels(config, data)
    check_batches(config, course, world, in_step)
    check_decoding(config, device)
    check_extra_transform(config, data.train, device)
    check_window(config.watch.profile, course.num_steps)
    check_trackers(config.watch, world)


def check_decoding(config: RunConfig, device: torch.device) -> None:
    """RecipeError if images cannot be decoded on the device that the recipe names."""
    if config.data.decode == "gpu":
        gpu_decode.check(device)


def build_run_course(config: RunConfig, epoch_samples: int) -> Course:
    """The course of a run: phases of batch and image sizes, from the recipe."""
    return build_course(
        config.run.length,
        epoch_samples=epoch_samples,
        batch=config.batch.size,
        image_size=config.data.image_size,
        batch_stages=config.schedule.batch_size,
        size_stages=config.schedule.image_size,
    )


def check_batches(
    config: RunConfig, course: Course, world: World, in_step: str | None = None
) -> None:
    """RecipeError if the ranks cannot share the global batches of a course.

    `in_step`: see Averager.waits_in_forward.
    """
    virtual = config.batch.virtual_ranks
    if virtual and virtual % world.size:
        raise RecipeError(
            "recipe.virtual-ranks-not-shared",
            "batch.virtual_ranks = {value} cannot be shared by {num_ranks} ranks: start {allowed}",
            value=virtual,
            num_ranks=world.size,
            allowed=" or ".join(f"{virtual >> n}" for n in range(virtual.bit_length())),
        )
    for phase in course.phases:
        key = "schedule.batch_size" if phase.start else "batch.size"
        if virtual and phase.batch % virtual:
            raise RecipeError(
                "recipe.batch-not-multiple",
                "{key} = {value} is not a multiple of batch.virtual_ranks = {num_virtual_ranks}",
                key=key,
                value=phase.batch,
                num_virtual_ranks=virtual,
            )
        if phase.batch < world.size:
            raise RecipeError(
                "recipe.batch-below-replicas",
                "{key} = {value} is smaller than the number of replicas ({num_replicas}): each "
                "needs at least one sample of every global batch",
                key=key,
                value=phase.batch,
                num_replicas=world.size,
            )
        smallest, largest = phase.batch // world.size, -(-phase.batch // world.size)
        micro = largest if config.batch.micro == "auto" else config.batch.micro
        if in_step is not None and -(-smallest // micro) != -(-largest // micro):
            raise RecipeError(
                "recipe.micro-batches-uneven",
                "batch.micro = {micro}: of {key} = {value} some of {num_ranks} ranks would take "
                "more micro-batches than others, which {setting} cannot do: make {key} a multiple "
                "of the number of ranks",
                micro=micro,
                key=key,
                value=phase.batch,
                num_ranks=world.size,
                setting=in_step,
            )


def check_batch_norm(config: RunConfig, model: nn.Module, course: Course, world: World) -> None:
    """RecipeError if a batch norm layer would normalise a single image."""
    if _least_part(config, model, world) == 1:
        return
    micro_size = None if config.batch.micro == "auto" else config.batch.micro
    size = config.batch.virtual_ranks or world.size
    for phase in course.phases:
        shares = (phase.batch // size, -(-phase.batch // size))
        if all(share // num_parts(share, micro_size) > 1 for share in shares):
            continue
        key = "schedule.batch_size" if phase.start else "batch.size"
        parts = f" on {world.size} ranks" if world.size > 1 else ""
        parts += f" in parts of batch.micro = {micro_size}" if micro_size else ""
        hint = ("batch.micro" if micro_size else key) + ", or fewer ranks" * (world.size > 1)
        raise RecipeError(
            "recipe.single-image-in-forward",
            "{key} = {value}{parts} leaves a single image in a forward pass, and batch norm needs "
            "two: use a larger {hint}",
            key=key,
            value=phase.batch,
            parts=parts,
            hint=hint,
        )


def _least_part(config: RunConfig, model: nn.Module, world: World) -> int:
    """Images that a forward pass needs: 2 for a rank whose batch norm layers see its own alone."""
    is_shared = world.size > 1 and config.average.batch_norm == "sync"
    return 2 if batch_norms(model) and not is_shared else 1


def check_extra_transform(config: RunConfig, data: Index | Stream, device: torch.device) -> None:
    """RecipeError if the function that `augment.extra` names cannot be used."""
    extra = config.augment.extra
    if extra is None:
        return
    announce_own("augment.extra", extra)
    size = config.data.image_size
    shape = (config.data.channels, *height_width(size))
    several, count = has_lists(data), len(data.classes)
    check_extra(extra, shape=shape, num_classes=count, device=device, has_lists=several)


def build_run_schedule(config: RunConfig, course: Course) -> Schedule:
    """The schedule of a run."""
    return build_schedule(
        config.schedule,
        course,
        lr=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        drop_path=config.model.drop_path,
    )


def adapt_to_images(
    config: RunConfig,
    model: nn.Module,
    data: Index | Stream,
    *,
    course: Course,
    device: torch.device,
) -> None:
    """Show a fresh model that has a method adapt_to the first training images of the run.

    The method takes normalised images, float[B, C, H, W]. Each rank reads the same ones.
    """
    adapt_to: Callable[[Tensor], None] | None = getattr(model, "adapt_to", None)
    if adapt_to is None:
        return
    if isinstance(data, Stream):
        raise RecipeError(
            "model.starts-from-images",
            "model.name = {name!r} starts from training images, which data.order = 'join' cannot "
            "show twice: use another order",
            name=config.model.name,
        )
    feeds = build_feeds(config, World(), device)
    with feeds.statistics(data, _FIRST_IMAGES, course.phases[0].image_size) as feed:
        adapt_to(torch.cat([batch.images_BCHW[batch.weights > 0].float() for batch in feed]))


def build_feeds(config: RunConfig, world: World, device: torch.device) -> Feeds:
    """The loader factory of a run; call `check_decoding` first."""
    return Feeds(
        data=config.data,
        augment=config.augment,
        global_batch=config.batch.size,
        seed=config.run.seed,
        channels_last=config.model.channels_last,
        world=world,
        device=device,
        virtual_ranks=config.batch.virtual_ranks,
        dtype=AUTOCASTS[config.batch.precision] or torch.float32,
    )


def reestimate_bn_statistics(
    config: RunConfig, feeds: Feeds, data: Datasets, course: Course, *, models: list[nn.Module]
) -> None:
    """Estimate batch norm statistics from run.bn_samples samples."""
    samples = config.run.bn_samples
    if samples and batch_norms(models[0]):
        with feeds.statistics(data.train, samples, course.phases[-1].image_size) as feed:
            precision = AUTOCASTS[config.batch.precision]
            estimate_statistics(models, feed, world=feeds.world, precision=precision)


def build_ema(config: RunConfig, model: nn.Module) -> Ema | None:
    """The moving averages of the weights; None if the recipe has none."""
    decays = config.model.averages
    if not decays:
        return None
    return Ema(model, decays, warmup=config.model.ema_warmup, cpu=config.model.ema_cpu)


def build_state(parts: Parts) -> TrainState:
    """All that a checkpoint of the run holds; for a model that the averager has wrapped."""
    config, averager, device = parts.config, parts.averager, parts.device
    lag = _LAG if averager.replica.differs else 1
    return TrainState(
        model=parts.model,
        emas=parts.ema.modules if parts.ema else {},
        optimizer=build_optimizer(parts.model, config.optim),
        averager=averager,
        scale=build_loss_scale(config, device),
        guard=Guard(device, config.run.max_skipped, averager.all_reduce_max, lag),
        clock=parts.clock,
        best_by=config.run.best_by,
        classes=list(parts.data.train.classes),
        has_lists=has_lists(parts.data.train),
        conditions=conditions(config, parts.world, device) | parts.loss_files,
    )


def build_loss_scale(config: RunConfig, device: torch.device) -> LossScale:
    """The loss scale: dynamic where gradients are fp16, else constant 1."""
    # Gradients sent as fp16 have its range, in whichever precision they were computed.
    is_narrow = "fp16" in (config.batch.precision, config.average.compress)
    return DynamicLossScale(device) if is_narrow else LossScale(device)


def build_mode(config: RunConfig, model: nn.Module, device: torch.device) -> Mode:
    """The mode of torch.compile of a run."""
    is_steady = config.schedule.drop_path_start is None
    return choose_mode(config.model.compile, model, device, is_steady=is_steady)


def build_step(
    config: RunConfig,
    state: TrainState,
    wrapped: nn.Module,
    *,
    loss: Loss,
    world: World,
    ema: Ema | None,
) -> TrainStep:
    """`wrapped`: the model from the averager."""
    compile_mode = build_mode(config, state.model, next(state.model.parameters()).device).name
    is_compiled = compile_mode != "off" or config.optim.compile
    if is_compiled and (reason := keep_compiled_code()) and world.is_first:
        print_line(f"compiled code is not kept for the next start: {reason}")
    compile_in_place(state.model, compile_mode, in_pieces=config.batch.virtual_ranks is None)
    passes = Passes(
        model=wrapped,
        averager=state.averager,
        loss=loss,
        autocast=AUTOCASTS[config.batch.precision],
        graphs=has_cuda_graphs(compile_mode),
        seed=config.run.seed,
        world=world,
        counts_hits=not state.has_lists,
        recomputed=Buffers(state.model) if config.model.grad_checkpointing else None,
    )
    parts: dict[str, Any] = {
        "passes": passes,
        "buffers": Buffers(state.model),
        "set_rates": _rate_setter(config, state),
        "update": Update(
            state.model, state.optimizer, state.scale, clip=_build_clip(config.optim, state.model)
        ),
        "update_ema": ema.update if ema else lambda step: None,
        "micro": None if config.batch.micro == "auto" else config.batch.micro,
    }
    if isinstance(state.averager, VirtualRanks):
        return VirtualRanksStep(**parts, averager=state.averager)
    return TrainStep(**parts)


def build_micro_search(
    config: RunConfig,
    state: TrainState,
    step: TrainStep,
    *,
    course: Course,
    report: Reporter,
) -> Callable[[Batch, int], None]:
    """Sets the step's micro-batch size before a phase, where the recipe leaves it open.

    It is not sought where ranks wait for each other in a forward pass: none can try by itself.
    """
    world = step.passes.world
    is_fixed = config.batch.micro != "auto" or config.batch.virtual_ranks is not None
    if is_fixed or state.averager.waits_in_forward is not None:
        return lambda batch, number: None
    return MicroBatchSearch(
        step,
        course=course,
        to_reserve=partial(bytes_of_moments, state.model, state.optimizer),
        report=partial(report.warn, "smaller micro-batch"),
        least=_least_part(config, state.model, world),
    )


def _rate_setter(config: RunConfig, state: TrainState) -> Callable[[Rates], None]:
    if config.schedule.drop_path_start is not None:
        assert config.model.drop_path  # build_schedule rejects the recipe otherwise
        set_drop_path = drop_path_setter(state.model, config.model.drop_path)

    def set_rates(rates: Rates) -> None:
        set_group_rates(state.optimizer, lr=rates.lr, weight_decay=rates.weight_decay)
        if rates.drop_path is not None:
            set_drop_path(rates.drop_path)

    return set_rates


def _build_clip(config: OptimConfig, model: nn.Module) -> Clip:
    if config.clip_norm is not None:
        return clip_by_norm(config.clip_norm)
    if config.clip_agc is not None:
        return clip_adaptively(config.clip_agc, exempt=classifier_parameters(model))
    return no_clip
