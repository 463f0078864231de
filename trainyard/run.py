"""The composition root: a RunConfig becomes built parts, then the loop runs them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from trainyard.config import RunConfig
from trainyard.course import Course
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
from trainyard.monitor.clock import Clock
from trainyard.monitor.console import ConsoleSink
from trainyard.monitor.meters import Meter
from trainyard.monitor.outcome import Outcome
from trainyard.monitor.progress import counter
from trainyard.monitor.quarantine import Quarantine
from trainyard.monitor.sinks import JsonLinesSink, Sinks
from trainyard.parts import (
    AUTOCASTS,
    AVERAGERS,
    course_of,
    ema_of,
    feeds_of,
    loss_scale_of,
    model_of,
    optimizer_of,
    schedule_of,
    step_of,
)
from trainyard.resume import claim, exclusive, resume, roll_back
from trainyard.train import checkpoint
from trainyard.train.checkpoint import TrainState
from trainyard.train.evaluate import Evaluation, evaluate
from trainyard.train.guard import Guard
from trainyard.train.loop import Report, Training
from trainyard.train.loop import train as train_loop
from trainyard.train.stop import StopSignal
from trainyard.world import World, member, pick_device, together


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
        model = model_of(config, len(data.train.classes)).to(device)
        course = course_of(config, plan.epoch_samples)
        if world.is_first:  # only now: a recipe that cannot be built leaves no directory behind
            claim(folder, config, data.fingerprints)
    with exclusive(folder, world), closing(_sinks(folder, course, world, console)) as sinks:
        return _train_in(
            folder, config, data, model, plan=plan, world=world, sinks=sinks, course=course
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
    course: Course,
) -> Outcome:
    """Train in a run directory that is this run's alone."""
    device = next(model.parameters()).device
    feeds = feeds_of(config, world, device)
    quarantine = _quarantine(folder, config, data, world)
    averager = AVERAGERS[config.average.name](world)
    ema = ema_of(config, model)
    if ema is not None:
        averager.follow(ema.module)
    wrapped = averager.wrap(model.train())
    state = TrainState(
        model=model,
        ema=ema.module if ema else None,
        optimizer=optimizer_of(config, model),
        averager=averager,
        scale=loss_scale_of(config, device),
        guard=Guard(device, config.run.max_skipped),
        clock=Clock(),
        classes=list(data.train.classes),
    )
    report = partial(_report, sinks, state, quarantine, course=course)
    watch = partial(_watch, quarantine=quarantine, sinks=sinks, total=len(data.val))
    resume(config.run.resume, folder, state, world=world, report=report)
    with (
        StopSignal(world) as stop,
        feeds.train(data.train, plan, course) as feed,
    ):
        feed.seek(state.step, state.skipped)
        stopped = train_loop(
            Training(
                state=state,
                num_steps=course.num_steps,
                feed=feed,
                step=step_of(
                    config,
                    state,
                    wrapped,
                    world=world,
                    ema=ema,
                    course=course,
                    report=partial(_warn, report, "smaller micro-batch"),
                ),
                schedule=schedule_of(config, course),
                meter=Meter(world, device, state.clock),
                quarantine=quarantine,
                report=report,
                evaluate=partial(_evaluate_state, config, feeds, data.val, state, on_batch=watch),
                save=partial(_save, world, folder.checkpoints, state, keep=config.run.keep),
                roll_back=partial(
                    roll_back,
                    folder,
                    state,
                    feed=feed,
                    course=course,
                    most=config.run.max_roll_backs,
                    world=world,
                    report=report,
                ),
                stop=stop,
                log_every=course.every(config.run.log_every),
                eval_every=course.every(config.run.eval_every),
                save_every=course.every(config.run.save_every),
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
            model = model_of(config, len(classes))
            checkpoint.put_weights(model, checkpoint.load_weights(path), path)
        feeds = feeds_of(config, world, device)
        with counter(console, "evaluating", len(index)) as show:
            models = {"": model.to(device)}
            found = _evaluate(config, feeds, index, models, on_batch=lambda _, n: show(n))[""]
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


def _sinks(folder: RunDirectory, course: Course, world: World, console: Console) -> Sinks:
    if not world.is_first:
        return Sinks([])
    return Sinks([JsonLinesSink(folder.metrics), ConsoleSink(course.num_steps, console)])


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


def _evaluate_state(
    config: RunConfig,
    feeds: Feeds,
    index: Index,
    state: TrainState,
    *,
    on_batch: Callable[[Batch, int], None],
) -> Report:
    """What a val report says of the weights, and under ema_… of their moving average."""
    models = {"": state.model} | ({"ema_": state.ema} if state.ema else {})
    found = _evaluate(config, feeds, index, models, on_batch=on_batch)
    report = found.pop("").as_dict()
    for prefix, evaluation in found.items():
        report |= {f"{prefix}{key}": getattr(evaluation, key) for key in ("top1", "top5", "loss")}
    return report


def _evaluate(
    config: RunConfig,
    feeds: Feeds,
    index: Index,
    models: Mapping[str, nn.Module],
    *,
    on_batch: Callable[[Batch, int], None],
) -> dict[str, Evaluation]:
    """Evaluate on a whole index; `on_batch` is told each batch and the samples begun by then."""

    def batches(feed: Feed) -> Iterator[Batch]:
        for number, batch in enumerate(feed, start=1):
            on_batch(batch, min(number * config.batch.size, len(index)))
            yield batch

    with feeds.evaluation(index) as feed:
        return evaluate(
            models,
            batches(feed),
            world=feeds.world,
            device=feeds.device,
            precision=AUTOCASTS[config.batch.precision],
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
    sinks: Sinks, state: TrainState, quarantine: Quarantine, report: Report, *, course: Course
) -> None:
    """Add to a report when and where in the run it is."""
    when = {
        "step": state.step,
        "epoch": course.epoch(state.step),
        "samples": course.samples(state.step),
        "time": state.clock.total,
    }
    if report["kind"] == "train":
        when["bad"] = quarantine.count("train")
    sinks.write(report | when)


def _warn(report: Callable[[Report], None], event: str, message: str) -> None:
    report({"kind": "event", "event": event, "level": "warning", "message": message})
