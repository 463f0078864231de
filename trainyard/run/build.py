"""Builders of a run's parts from the recipe's sections."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from trainyard.averaging.base import Averager
from trainyard.averaging.config import AVERAGERS
from trainyard.averaging.topology import KEY as TOPOLOGY
from trainyard.averaging.virtual_ranks import VirtualRanks
from trainyard.config import RunConfig
from trainyard.course import Course, build_course, stage_size
from trainyard.data.augment.extra import check_extra
from trainyard.data.batch import Batch
from trainyard.data.device import gpu_decode
from trainyard.data.feeds import Feeds
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import Datasets, open_datasets
from trainyard.data.stream.shards import Stream
from trainyard.distributed import Heartbeat, discover_or_alone
from trainyard.errors import RecipeError
from trainyard.image_size import height_width, num_pixels
from trainyard.model.build import build_model
from trainyard.model.drop_path import drop_path_setter
from trainyard.model.ema import Ema
from trainyard.model.execution import (
    Mode,
    choose_mode,
    compile_in_place,
    has_cuda_graphs,
    keep_compiled_code,
    recompute_activations,
)
from trainyard.model.freeze import freeze, freeze_statistics
from trainyard.monitor.progress import counter
from trainyard.optim.groups import classifier_parameters, set_group_rates
from trainyard.optim.schedules import Rates, Schedule, build_schedule
from trainyard.own_code import announce, as_recipe_error, imported, is_own
from trainyard.printable import print_line
from trainyard.run.labels import has_lists
from trainyard.run.metrics import Reporter
from trainyard.training import checkpoint
from trainyard.training.bn_statistics import batch_norms, estimate_statistics
from trainyard.training.buffers import Buffers
from trainyard.training.checkpoint import TrainState
from trainyard.training.micro import MicroBatchSearch, bytes_of_moments
from trainyard.training.precision import AUTOCASTS
from trainyard.training.step import Loss, Passes, TrainStep, num_parts
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
from trainyard.world import World, together

_FIRST_IMAGES = 4096  # that a model which adapts to images sees before the first step


def build_data(config: RunConfig, world: World, console: Console, heartbeat: Heartbeat) -> Datasets:
    """The training and validation data of a run."""
    with counter(console, "indexing samples") as show:
        data = open_datasets(config.data, world, heartbeat.counted("indexing", show))
    heartbeat.mark("start")  # the wait for the first rank's index may have been long
    return data


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
        found: type[Averager] = getattr(import_module(f"trainyard.averaging.{module}"), kind)
        return found
    announce_own("average.name", name)
    own: Any = imported("average.name", name)
    if not (isinstance(own, type) and issubclass(own, Averager)):
        raise RecipeError(
            "function.not-averager",
            "{key} = {value!r}: write a class derived from trainyard.Averager, or from one of its "
            "kinds",
            key="average.name",
            value=name,
        )
    return own


def announce_own(key: str, name: str | None) -> None:
    """Print, on the first rank, the user's own file that a recipe key imports, if it does."""
    if name is not None and is_own(name) and discover_or_alone().is_first:
        announce(key, name)


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
        least, most = phase.batch // world.size, -(-phase.batch // world.size)
        micro = most if config.batch.micro == "auto" else config.batch.micro
        if in_step is not None and -(-least // micro) != -(-most // micro):
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
    asked = None if config.batch.micro == "auto" else config.batch.micro
    size = config.batch.virtual_ranks or world.size
    for phase in course.phases:
        shares = (phase.batch // size, -(-phase.batch // size))
        if all(share // num_parts(share, asked) > 1 for share in shares):
            continue
        key = "schedule.batch_size" if phase.start else "batch.size"
        parts = f" on {world.size} ranks" if world.size > 1 else ""
        parts += f" in parts of batch.micro = {asked}" if asked else ""
        hint = ("batch.micro" if asked else key) + ", or fewer ranks" * (world.size > 1)
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


def check_decoding(config: RunConfig, device: torch.device) -> None:
    """RecipeError if images cannot be decoded on the device that the recipe names."""
    if config.data.decode == "gpu":
        gpu_decode.check(device)


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


def build_run_model(config: RunConfig, num_classes: int) -> nn.Module:
    """The model for every image size of the recipe, freshly initialised, with frozen parameters."""
    announce_own("model.name", config.model.name)
    sizes = {config.data.image_size, *map(stage_size, config.schedule.image_size)}
    largest = max(sizes, key=num_pixels)  # position embeddings get the finest trained grid
    if config.data.eval_size is not None:
        sizes.add(config.data.eval_size)
    model = build_model(
        config.model,
        num_classes=num_classes,
        image_size=largest,
        other_sizes=sizes - {largest},
        channels=config.data.channels,
    )
    freeze(model, config.model.freeze)
    if config.model.freeze_statistics:
        freeze_statistics(model.modules())
    if config.model.grad_checkpointing:
        recompute_activations(model, config.model.name)
    return model


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


def trained_model(config: RunConfig, path: Path, num_classes: int, weights: str) -> nn.Module:
    """The model of a recipe with weights of a checkpoint, or a moving average, by its name."""
    model = build_run_model(config, num_classes)
    checkpoint.put_weights(model, checkpoint.load_weights(path, weights), path)
    return model


def build_ema(config: RunConfig, model: nn.Module) -> Ema | None:
    """The moving averages of the weights; None if the recipe has none."""
    decays = config.model.averages
    if not decays:
        return None
    return Ema(model, decays, warmup=config.model.ema_warmup, cpu=config.model.ema_cpu)


def build_loss_scale(config: RunConfig, device: torch.device) -> LossScale:
    """The loss scale: dynamic where gradients are fp16, else constant 1."""
    # Gradients sent as fp16 have its range, in whichever precision they were computed.
    is_narrow = "fp16" in (config.batch.precision, config.average.compress)
    return DynamicLossScale(device) if is_narrow else LossScale(device)


def build_run_schedule(config: RunConfig, course: Course) -> Schedule:
    """The schedule of a run."""
    return build_schedule(
        config.schedule,
        course,
        lr=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        drop_path=config.model.drop_path,
    )


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
    update_ema: Callable[[int], None],
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
            state.model,
            state.optimizer,
            state.scale,
            clip=_build_clip(config, state.model),
        ),
        "update_ema": update_ema,
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


def _build_clip(config: RunConfig, model: nn.Module) -> Clip:
    if config.optim.clip_norm is not None:
        return clip_by_norm(config.optim.clip_norm)
    if config.optim.clip_agc is not None:
        return clip_adaptively(config.optim.clip_agc, exempt=classifier_parameters(model))
    return no_clip
