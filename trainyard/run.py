"""The composition root: a RunConfig becomes built parts, then the loop runs them."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.base import Averager
from trainyard.config import RunConfig
from trainyard.data.datasets import (
    Datasets,
    Feeds,
    description,
    open_datasets,
    open_validation,
)
from trainyard.data.feed import Batch, Feed
from trainyard.data.index import Index
from trainyard.data.order import training_plan
from trainyard.data.plan import EndlessPlan
from trainyard.errors import DataError, RecipeError
from trainyard.files import RunDirectory
from trainyard.model import build_model
from trainyard.monitor.clock import Clock
from trainyard.monitor.console import ConsoleSink
from trainyard.monitor.meters import Meter
from trainyard.monitor.outcome import Outcome
from trainyard.monitor.progress import counter
from trainyard.monitor.quarantine import Quarantine
from trainyard.monitor.sinks import JsonLinesSink, Sinks
from trainyard.optim.optimizers import build_optimizer
from trainyard.optim.schedules import Every, Scale, build_schedule
from trainyard.resume import claim, exclusive, resume
from trainyard.train import checkpoint
from trainyard.train.checkpoint import TrainState
from trainyard.train.evaluate import Evaluation, evaluate
from trainyard.train.loop import Report, Training
from trainyard.train.loop import train as train_loop
from trainyard.train.step import TrainStep
from trainyard.train.stop import StopSignal
from trainyard.world import World, member, pick_device, together

AVERAGERS: dict[str, Callable[[World], Averager]] = {"allreduce": AllReduce}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    world: World,
    console: Console,
) -> Outcome:
    """Train a recipe in a run directory, going on where an earlier run of it ended.

    Every rank of the world calls this alike. Returns when the run is complete or was asked to
    stop; raises a TrainyardError, on all ranks, for anything wrong with recipe, data or folder.
    """
    with member(world):
        return _train(config, RunDirectory(Path(folder)), world, console)


def _train(config: RunConfig, folder: RunDirectory, world: World, console: Console) -> Outcome:
    device = pick_device(world)
    with counter(console, "indexing samples") as progress:
        data = open_datasets(config.data, world, progress)
    with together(world):
        _check_batch(config, world)
        plan = training_plan(
            config.data, data.train, global_batch=config.batch.size, seed=config.run.seed
        )
        torch.manual_seed(config.run.seed)  # the same first weights on every rank
        model = _model(config, len(data.train.classes)).to(device)
        if world.is_first:  # only now: a recipe that cannot be built leaves no directory behind
            claim(folder, config, data.fingerprints)
    scale = _scale(config, plan.epoch_samples)
    with exclusive(folder, world), closing(_sinks(folder, scale, world, console)) as sinks:
        return _train_in(
            folder, config, data, model, plan=plan, world=world, sinks=sinks, scale=scale
        )


def _train_in(
    folder: RunDirectory,
    config: RunConfig,
    data: Datasets,
    model: nn.Module,
    *,
    plan: EndlessPlan,
    world: World,
    sinks: Sinks,
    scale: Scale,
) -> Outcome:
    """Train in a run directory that is this run's alone."""
    device = next(model.parameters()).device
    feeds = _feeds(config, world, device)
    quarantine = _quarantine(folder, config, data, world)
    averager = AVERAGERS[config.average.name](world)
    wrapped = averager.wrap(model.train())
    optimizer = build_optimizer(model, config.optim)
    state = TrainState(model, optimizer, averager, Clock(), list(data.train.classes))
    report = partial(_report, sinks, state, quarantine, epoch_samples=plan.epoch_samples)
    watch = partial(_watch, quarantine=quarantine, sinks=sinks, total=len(data.val))
    resume(config.run.resume, folder, state, world=world, report=report)
    num_steps = scale.steps("100%")
    with (
        StopSignal(world) as stop,
        feeds.train(data.train, plan, state.step, num_steps) as feed,
    ):
        stopped = train_loop(
            Training(
                state=state,
                num_steps=num_steps,
                global_batch=config.batch.size,
                feed=iter(feed),
                step=_build_step(config, state, wrapped, world),
                schedule=build_schedule(config.schedule, lr=config.optim.lr, scale=scale),
                meter=Meter(world, device, state.clock),
                quarantine=quarantine,
                report=report,
                evaluate=partial(_evaluate, config, feeds, data.val, model, on_batch=watch),
                save=partial(_save, world, folder.checkpoints, state, keep=config.run.keep),
                stop=stop,
                log_every=_every(config.run.log_every, scale),
                eval_every=_every(config.run.eval_every, scale),
                save_every=_every(config.run.save_every, scale),
                phase=state.clock.phase,
            )
        )
    return Outcome(str(folder.path), state.step, state.clock.total, state.last, state.best, stopped)


def evaluate_checkpoint(
    config: RunConfig, path: Path, *, world: World, console: Console
) -> Evaluation:
    """Evaluate a checkpoint on `config.data.val`, every image once, on any number of ranks."""
    with member(world):
        device = pick_device(world)
        with together(world):
            if world.is_first:
                checkpoint.check(path)
        with together(world):
            classes = checkpoint.read_progress(path)["classes"]
        with counter(console, "indexing samples") as progress:
            index = open_validation(config.data, classes, world, progress)
        with together(world):
            model = _model(config, len(classes))
            checkpoint.put_weights(model, checkpoint.load_weights(path), path)
        feeds = _feeds(config, world, device)
        with counter(console, "evaluating", len(index)) as show:
            found = _evaluate(config, feeds, index, model.to(device), on_batch=lambda _, n: show(n))
        with together(world):
            if not found.samples:
                raise DataError(
                    f"{description(config.data.val)}: none of its {found.bad:,} images can be read"
                )
        return found


# --- parts ---


def _check_batch(config: RunConfig, world: World) -> None:
    if config.batch.size < world.size:
        raise RecipeError(
            f"batch.size = {config.batch.size} is smaller than the number of replicas "
            f"({world.size}): each needs at least one sample of every global batch"
        )


def _scale(config: RunConfig, epoch_samples: int) -> Scale:
    num_steps = Scale(epoch_samples, config.batch.size).steps(config.run.length)
    return Scale(epoch_samples, config.batch.size, run=num_steps * config.batch.size)


def _every(duration: str, scale: Scale) -> Every:
    return Every(scale.samples(duration), scale.step)


def _sinks(folder: RunDirectory, scale: Scale, world: World, console: Console) -> Sinks:
    if not world.is_first:
        return Sinks([])
    return Sinks([JsonLinesSink(folder.metrics), ConsoleSink(scale.steps("100%"), console)])


def _quarantine(
    folder: RunDirectory, config: RunConfig, data: Datasets, world: World
) -> Quarantine:
    with together(world):
        return Quarantine(
            folder.quarantine,
            world=world,
            max_bad=config.data.max_bad,
            num_samples={"train": len(data.train), "val": len(data.val)},
        )


def _feeds(config: RunConfig, world: World, device: torch.device) -> Feeds:
    return Feeds(
        data=config.data,
        augment=config.augment,
        global_batch=config.batch.size,
        seed=config.run.seed,
        channels_last=config.model.channels_last,
        world=world,
        device=device,
    )


def _model(config: RunConfig, num_classes: int) -> nn.Module:
    return build_model(
        config.model,
        num_classes=num_classes,
        image_size=config.data.image_size,
        eval_size=config.data.eval_size,
    )


def _build_step(config: RunConfig, state: TrainState, model: nn.Module, world: World) -> TrainStep:
    return TrainStep(
        model=model,
        optimizer=state.optimizer,
        averager=state.averager,
        micro=None if config.batch.micro == "auto" else config.batch.micro,
        autocast=PRECISIONS[config.batch.precision],
        label_smoothing=config.augment.label_smoothing,
        clip_norm=config.optim.clip_norm,
        seed=config.run.seed,
        rank=world.rank,
    )


def _evaluate(
    config: RunConfig,
    feeds: Feeds,
    index: Index,
    model: nn.Module,
    *,
    on_batch: Callable[[Batch, int], None],
) -> Evaluation:
    """Evaluate on a whole index; `on_batch` is told each batch and the samples begun by then."""

    def batches(feed: Feed) -> Iterator[Batch]:
        for number, batch in enumerate(feed, start=1):
            on_batch(batch, min(number * config.batch.size, len(index)))
            yield batch

    with feeds.evaluation(index) as feed:
        return evaluate(
            model,
            batches(feed),
            world=feeds.world,
            device=feeds.device,
            precision=PRECISIONS[config.batch.precision],
        )


def _watch(batch: Batch, count: int, *, quarantine: Quarantine, sinks: Sinks, total: int) -> None:
    quarantine.note("val", batch.bad)
    sinks.show_evaluation(count, total)


def _save(world: World, folder: Path, state: TrainState, *, keep: int) -> None:
    with together(world):
        if world.is_first:
            checkpoint.save_checkpoint(state, folder, keep=keep)
            checkpoint.point_best(folder, state)


def _report(
    sinks: Sinks, state: TrainState, quarantine: Quarantine, report: Report, *, epoch_samples: int
) -> None:
    """Add to a report when and where in the run it is."""
    when = {
        "step": state.step,
        "epoch": state.samples_seen / epoch_samples,
        "samples": state.samples_seen,
        "time": state.clock.total,
    }
    if report["kind"] == "train":
        when["bad"] = quarantine.count("train")
    sinks.write(report | when)
