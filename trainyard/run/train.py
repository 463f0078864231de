"""The composition root: builds the parts of a run from a RunConfig, and runs the loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from trainyard.averaging.base import Averager
from trainyard.config import RunConfig
from trainyard.course import Course, Due, seconds_of
from trainyard.data.batch import Batch
from trainyard.data.device.feed import EvaluationFeeds
from trainyard.data.device.join import passes_are_over
from trainyard.data.feeds import Feeds
from trainyard.data.open_datasets import Datasets
from trainyard.data.order import Order, training_order
from trainyard.distributed import Heartbeat, Watchdog, init_distributed
from trainyard.errors import Stopped
from trainyard.files import RunDirectory
from trainyard.model.ema import Ema
from trainyard.monitor.clock import Clock
from trainyard.monitor.devices import peak_flops
from trainyard.monitor.eta import Eta
from trainyard.monitor.history import score
from trainyard.monitor.meters import Meter
from trainyard.monitor.outcome import Outcome
from trainyard.monitor.profiler import profiling
from trainyard.monitor.reporter import Reporter
from trainyard.monitor.reports import Report
from trainyard.monitor.sinks import JsonLinesSink, Sinks
from trainyard.optim.optimizers import build_optimizer
from trainyard.optim.schedules import Schedule
from trainyard.run.build import (
    adapt_to_images,
    build_averager,
    build_data,
    build_ema,
    build_feeds,
    build_loss_scale,
    build_mode,
    build_run_course,
    build_run_model,
    build_run_schedule,
    build_step,
    check_batch_norm,
    check_batches,
    check_decoding,
    check_extra_transform,
    move_to_device,
    reestimate_bn_statistics,
)
from trainyard.run.distillation import build_run_loss
from trainyard.run.evaluation import predict
from trainyard.run.head import head
from trainyard.run.labels import check_labels, has_lists, labels_of
from trainyard.run.loggers import check_trackers, open_loggers
from trainyard.run.metrics import ideal_seconds, open_quarantine, with_bottleneck_reports
from trainyard.run.pretrained import (
    Beginning,
    put_initial_weights,
    resumed_weights,
    with_pixels,
)
from trainyard.run.resume import (
    Seekable,
    claim_directory,
    conditions,
    is_new_run,
    resume,
    roll_back,
    startup_facts,
)
from trainyard.training.averages import prefix_of, with_best_average
from trainyard.training.checkpoint import TrainState
from trainyard.training.guard import Guard
from trainyard.training.loop import Training, save
from trainyard.training.loop import train as train_loop
from trainyard.training.optimizer_state import evaluation_weights
from trainyard.training.precision import use_precision
from trainyard.training.predictions import summary
from trainyard.training.recorded import record
from trainyard.training.saving import Saver
from trainyard.training.sharding import is_sharded
from trainyard.training.step import Loss, StepStats
from trainyard.training.stop import StopSignal
from trainyard.world import (
    World,
    check_devices,
    gather,
    pick_device,
    together,
    with_cores,
)

_OF_CHECKPOINTS = ("save", "roll back")  # phases that wait for the run directory's disk
_LAG = 8  # steps that replicas may drift apart if they do not wait for each other


def train(config: RunConfig, folder: str | Path, *, world: World, console: Console) -> Outcome:
    """Train a recipe in a run directory, resuming an earlier run in it.

    Every rank of the world makes the same call. Returns when the run is complete or was told to
    stop; raises a TrainyardError, on all ranks, for any problem with recipe, data or folder.
    """
    with init_distributed(world, startup_facts(config)) as watchdog:
        directory, world = RunDirectory(Path(folder)), with_cores(world)
        return _train(config, directory, world, console=console, watchdog=watchdog)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The built parts of a run, on this rank."""

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
    begun: Beginning
    loss: Loss
    clock: Clock = field(default_factory=Clock)
    """Starts before environment.json tells how long the start took: no second is in neither."""


def _train(
    config: RunConfig, folder: RunDirectory, world: World, *, console: Console, watchdog: Watchdog
) -> Outcome:
    watchdog.begin(config.run.hang_timeout)
    watchdog.heartbeat.limits_of |= dict.fromkeys(_OF_CHECKPOINTS, config.run.max_save)
    run = _built(config, folder, world, console=console, watchdog=watchdog)
    with (  # only now: a recipe that cannot be built leaves no directory behind
        claim_directory(folder, run.config, run.data.fingerprints, world) as check,
        open_loggers(run.config, folder, run.course, check, world=world, console=console) as sinks,
    ):
        watchdog.write_to(folder.stacks)
        return sinks.concluded(_train_in(run, sinks, watchdog))


def _built(
    config: RunConfig, folder: RunDirectory, world: World, *, console: Console, watchdog: Watchdog
) -> _Run:
    device = pick_device(world)
    use_precision(config.batch.precision)
    check_devices(world, device)
    averager = build_averager(config, world, device)
    data = build_data(config, world, console, watchdog.heartbeat)
    is_new = is_new_run(config.run.resume, folder, world)
    with together(world):
        classes = data.train.classes
        order = training_order(
            config.data, data.train, global_batch=config.batch.size, seed=config.run.seed
        )
        course = build_run_course(config, order.epoch_samples)
        _check(config, data, course, world=world, device=device)
        schedule = build_run_schedule(config, course)
        torch.manual_seed(config.run.seed)  # the same first weights on every rank
        model = build_run_model(config, len(classes))
        check_batch_norm(config, model, course, world)
        if is_new:
            begun = put_initial_weights(config.model, model, classes)
        else:
            begun = resumed_weights(config.run.resume, folder)
        config = with_pixels(config, begun)
        if is_new and config.model.checkpoint is None:
            adapt_to_images(config, model, data.train, course=course, device=device)
        loss = build_run_loss(config, data.train, course=course, device=device)
    return _Run(
        config=config,
        folder=folder,
        world=world,
        device=device,
        averager=averager,
        data=data,
        order=order,
        course=course,
        schedule=schedule,
        model=move_to_device(config, model, world=world, device=device),
        begun=begun,
        loss=loss,
    )


def _check(
    config: RunConfig, data: Datasets, course: Course, *, world: World, device: torch.device
) -> None:
    check_labels(config, data)
    check_batches(config, course, world)
    check_decoding(config, device)
    check_extra_transform(config, data.train, device)
    check_trackers(config.watch, world)


def _train_in(run: _Run, sinks: Sinks, watchdog: Watchdog) -> Outcome:
    """Train in a directory that is claimed."""
    config, folder, world, course = run.config, run.folder, run.world, run.course
    device, averager, data = run.device, run.averager, run.data
    ema, heartbeat = build_ema(config, run.model), watchdog.heartbeat
    ideal_s = _ideal_seconds(run)
    wrapped = averager.wrap(run.model.train())
    for module in ema.modules.values() if ema else ():
        averager.register_ema(module)
    state = _state(run, averager, ema)
    quarantine = open_quarantine(config, folder, data, world)
    eta = Eta(course, course.every(config.run.eval_every))
    report = Reporter(sinks.write, state, course, partial(quarantine.count, "train"), eta)
    if _resumed(run, state, report):
        return replace(_outcome(run, state, None), was_complete=True)
    feeds = build_feeds(config, world, device)
    step = _observed_step(run, state, wrapped, ema=ema, report=report)
    profile = config.watch.profile if world.is_first else None
    saver = _saver(run, watchdog, report)

    def on_batch(batch: Batch, count: int) -> None:
        heartbeat.mark("eval", state.step)
        quarantine.note("val", batch.bad)
        sinks.show_evaluation(count, len(data.val))
        stop.check()

    with (
        StopSignal(world, _LAG if averager.replica.differs else 1, saver) as stop,
        saver,  # inside: a launcher that misses a rank signals one that completes a checkpoint
        feeds.training(data.train, run.order, course, place=state.stream, report=report) as feed,
        feeds.evaluations(data.val) as kept,
        profiling(profile, folder.path / "profile", report) as profiled,
        watchdog.explaining(),
    ):
        feed.seek(state.step, state.skipped)
        stopped = _trained(
            Training(
                state=state,
                is_over=feed.is_over,
                feed=feed,
                step=profiled(step),
                schedule=run.schedule,
                meter=_meter(run, state, ideal_s),
                quarantine=quarantine,
                report=report,
                evaluate=partial(_evaluate, run, feeds, state, kept=kept, on_batch=on_batch),
                save=partial(_save, state, saver, stop, heartbeat),
                roll_back=partial(
                    _roll_back, run, state, saver, feed=feed, report=report, heartbeat=heartbeat
                ),
                stop=stop,
                log_every=course.every(config.run.log_every),
                eval_every=course.every(config.run.eval_every),
                save_every=feed.saving(_save_every(run, saver, stop)),
                phase=partial(_phase, state, heartbeat, stop),
            ),
            saver,
            heartbeat,
        )
    return _outcome(run, state, stopped)


def _resumed(run: _Run, state: TrainState, report: Reporter) -> bool:
    """Load the run's checkpoint, if there is one. True if neither a step nor an evaluation is left.

    Nothing is reported then: the run does not go on. Otherwise its head is.
    """
    course = run.course

    def is_complete() -> bool:
        is_over = state.step >= course.num_steps
        if run.config.data.order == "join":
            is_over = passes_are_over(course, state.step, state.stream.get("ends", []))
        return is_over and state.last.get("step") == state.step

    resume(
        run.config.run.resume,
        run.folder,
        state,
        world=run.world,
        report=lambda event: None if is_complete() else report(event),
    )
    if is_complete():
        return True
    _report_head(run, state, report)
    return False


def _report_head(run: _Run, state: TrainState, report: Reporter) -> None:
    """The first rank's alone: with --all-ranks each has a console."""
    if not run.world.is_first:
        return
    for event in head(
        run.config,
        run.data,
        run.course,
        model=run.model,
        begun=run.begun,
        world=run.world,
        device=run.device,
        step=state.step,
    ):
        report(event)
    for message in run.begun.log:
        report({"kind": "event", "event": "initial weights", "message": message})


def _ideal_seconds(run: _Run) -> Callable[[int], float | None]:
    peak = peak_flops(run.device, run.config.batch.precision)
    return ideal_seconds(run.course, run.model, peak, channels=run.config.data.channels)


def _meter(run: _Run, state: TrainState, ideal_s: Callable[[int], float | None]) -> Meter:
    def ideal_now() -> float | None:
        return ideal_s(state.step - 1)

    has_top1 = not state.has_lists
    return Meter(run.world, run.device, state.clock, ideal_now, has_top1=has_top1)


def _outcome(run: _Run, state: TrainState, stopped: type[Stopped] | None) -> Outcome:
    return Outcome(
        run=str(run.folder.path),
        step=state.step,
        seconds=state.clock.total,
        last=state.last,
        best=state.best,
        stopped=stopped,
        best_by=state.best_by,
    )


def _trained(training: Training, saver: Saver, heartbeat: Heartbeat) -> type[Stopped] | None:
    """The reason of a stop, or None; the last checkpoint is complete by then.

    An evaluation that was cut off is repeated after a resume.
    """
    try:
        stopped = train_loop(training)
    except Stopped as reason:
        save(training)
        stopped = type(reason)
    with training.phase("save"):
        _wait(saver, heartbeat)
    return stopped


@contextmanager
def _phase(state: TrainState, heartbeat: Heartbeat, stop: StopSignal, name: str) -> Iterator[None]:
    """A timed phase. Data belongs to the next step, evaluations and saves to the last one."""
    heartbeat.mark(name, state.step + (name == "data"))
    with state.clock.phase(name), stop.waiting_for_data() if name == "data" else nullcontext():
        yield
    heartbeat.mark("step", state.step + 1)


def _record_loss(folder: RunDirectory, report: Reporter, event: str, reason: str) -> str:
    """The reason why all ranks end, with the step from which the run resumes, as a warning.

    It is appended to metrics.jsonl, by any rank: the first one, which writes for all, may be lost.
    """
    latest = folder.checkpoints / "latest"
    place = f"resumes from {latest.resolve().name}" if latest.exists() else "starts again"
    message = f"{reason}; the same command {place}"
    # The directory may have been renamed: that is what ended the first rank then.
    with suppress(OSError):
        replace(report, write=JsonLinesSink(folder.metrics).write).warn(event, message)
    return message


def _save_every(run: _Run, saver: Saver, stop: StopSignal) -> Due:
    """The condition of a save. Ranks decide saves by time together, like stops."""
    return stop if saver.by_time else run.course.every(run.config.run.save_every)


def _saver(run: _Run, watchdog: Watchdog, report: Reporter) -> Saver:
    saver = Saver(
        run.folder.checkpoints,
        run.world,
        keep=run.config.run.keep,
        all_write=run.averager.replica.total > 1 or is_sharded(run.model),
        every_s=seconds_of(run.config.run.save_every),
    )
    watchdog.before_end = saver.join
    watchdog.record = partial(_record_loss, run.folder, report)
    return saver


def _observed_step(
    run: _Run, state: TrainState, wrapped: nn.Module, *, ema: Ema | None, report: Reporter
) -> Callable[[Any, int, Any], StepStats]:
    """The training step, with reports of the run's bottleneck."""
    if run.config.model.compile == "auto":
        mode = build_mode(run.config, run.model, run.device)
        message = f"model.compile = 'auto' takes {mode.name!r}: {mode.reason}"
        report({"kind": "event", "event": "compile", "mode": mode.name, "message": message})
    step = build_step(
        run.config,
        state,
        wrapped,
        loss=run.loss,
        world=run.world,
        update_ema=ema.update if ema else lambda step: None,
        course=run.course,
        report=partial(report.warn, "smaller micro-batch"),
    )
    return with_bottleneck_reports(
        step, run.config, run.course, state.clock, world=run.world, report=report
    )


def _state(run: _Run, averager: Averager, ema: Ema | None) -> TrainState:
    return TrainState(
        model=run.model,
        emas=ema.modules if ema else {},
        optimizer=build_optimizer(run.model, run.config.optim),
        averager=averager,
        scale=build_loss_scale(run.config, run.device),
        guard=Guard(run.device, run.config.run.max_skipped, averager.all_reduce_max),
        clock=run.clock,
        best_by=run.config.run.best_by,
        classes=list(run.data.train.classes),
        has_lists=has_lists(run.data.train),
        conditions=conditions(run.config, run.world, run.device),
    )


def _evaluate(
    run: _Run,
    feeds: Feeds,
    state: TrainState,
    *,
    kept: EvaluationFeeds,
    on_batch: Callable[[Batch, int], None],
) -> Report:
    """The val report of the weights and, under ema_…, of their moving averages."""
    models = {"": state.model} | {prefix_of(name): ema for name, ema in state.emas.items()}
    with evaluation_weights(state.optimizer):
        reestimate_bn_statistics(run.config, feeds, run.data, run.course, models=[*models.values()])
        said = predict(
            run.config,
            feeds,
            kept.one(),
            models,
            index=run.data.val,
            on_batch=on_batch,
        )
    labels, by = labels_of(run.data.val, len(state.classes)), run.config.run.best_by
    found = with_best_average(summary(said, labels), [*state.emas], by)
    # The first rank's: another processor may round another way, and all must agree on the best.
    found = gather(run.world, found)[0]
    with together(run.world):
        if run.world.is_first and score(found, by) > score(state.best, by):
            weights = max(said, key=lambda prefix: (found[f"{prefix}{by}"], prefix))
            record(run.folder.predictions, state.step, labels, said[weights], weights=weights)
    return found


def _roll_back(
    run: _Run,
    state: TrainState,
    saver: Saver,
    *,
    feed: Seekable,
    report: Reporter,
    heartbeat: Heartbeat,
) -> None:
    heartbeat.mark("roll back", state.step)
    _wait(saver, heartbeat)
    roll_back(
        run.folder,
        state,
        feed=feed,
        course=run.course,
        most=run.config.run.max_roll_backs,
        world=run.world,
        report=report,
    )
    heartbeat.mark("step", state.step + 1)


def _save(state: TrainState, saver: Saver, stop: StopSignal, heartbeat: Heartbeat) -> None:
    state.guard.settle()
    _wait(saver, heartbeat)
    saver.save(state)
    stop.saved()


def _wait(saver: Saver, heartbeat: Heartbeat) -> None:
    """Wait for the pending checkpoint; each written part of it counts as progress."""
    saver.wait(heartbeat.again)
