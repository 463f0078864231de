"""A run on this rank: the loop, and what it does between steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from trainyard.config import RunConfig
from trainyard.course import Due, seconds_of
from trainyard.data.batch import Batch
from trainyard.data.device.join import passes_are_over
from trainyard.data.storage.credentials import without_secrets
from trainyard.distributed import Watchdog, init_distributed
from trainyard.errors import Stopped, TrainyardError
from trainyard.files import RunDirectory
from trainyard.monitor.bounds import Bounds
from trainyard.monitor.devices import peak_flops
from trainyard.monitor.eta import Eta
from trainyard.monitor.history import ENDED_EARLY, FAILED, PROBE, score
from trainyard.monitor.meters import Meter
from trainyard.monitor.outcome import Outcome, without_better
from trainyard.monitor.profiler import profiling
from trainyard.monitor.quarantine import Quarantine
from trainyard.monitor.reports import JsonLinesSink, Report
from trainyard.run.build import (
    Parts,
    build_feeds,
    build_micro_search,
    build_mode,
    build_parts,
    build_state,
    build_step,
    reestimate_bn_statistics,
)
from trainyard.run.labels import labels_of
from trainyard.run.loggers import Loggers, open_loggers
from trainyard.run.metrics import Reporter, ideal_seconds
from trainyard.run.predict import counted, predict
from trainyard.run.resume import (
    check_end,
    claim_directory,
    resume,
    roll_back,
    startup_facts,
    take_end,
)
from trainyard.run.summary import run_summary
from trainyard.training.checkpoint import evaluation_weights
from trainyard.training.predictions import summary
from trainyard.training.recorded import record
from trainyard.training.saver import Saver
from trainyard.training.step import TrainStep
from trainyard.training.stop import StopSignal
from trainyard.training.weight_names import prefix_of, with_best_average
from trainyard.world import World, broadcast, own_generators, together, with_cores


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    world: World,
    console: Console,
    is_named: bool = False,
) -> Outcome:
    """Train a recipe in a run directory, resuming an earlier run in it.

    `is_named`: see RunDirectory.

    Every rank of the world makes the same call. Returns when the run is complete or was told to
    stop; raises a TrainyardError, on all ranks, for any problem with recipe, data or folder.
    """
    with init_distributed(world, startup_facts(config)) as watchdog:
        directory, world = RunDirectory(Path(folder), is_named=is_named), with_cores(world)
        return train_joined(config, directory, world, console=console, watchdog=watchdog)


@own_generators()
def train_joined(
    config: RunConfig, folder: RunDirectory, world: World, *, console: Console, watchdog: Watchdog
) -> Outcome:
    """`train` on ranks that have joined already."""
    watchdog.begin(config.run.hang_timeout)
    # Phases that wait for the run directory's disk.
    watchdog.heartbeat.limits_of |= dict.fromkeys(("save", "roll back"), config.run.max_save)
    parts = build_parts(config, folder, world, console=console, heartbeat=watchdog.heartbeat)
    config, new = parts.config, parts.initial.new_classes
    with (  # only now: a recipe that cannot be built leaves no directory behind
        claim_directory(folder, config, parts.data.fingerprints, world, new_classes=new) as check,
        open_loggers(
            config,
            folder,
            parts.course,
            check,
            num_classes=len(parts.data.train.classes),
            world=world,
            console=console,
        ) as sinks,
    ):
        watchdog.write_to(folder.stacks)
        new_end = take_end(folder, config, parts.course, world)
        trainer = Trainer(parts, sinks, watchdog, new_end)
        with _recording_failure(trainer, check):
            return sinks.concluded(trainer.train())


@contextmanager
def _recording_failure(trainer: "Trainer", check: Callable[[], None]) -> Iterator[None]:
    """Inside, an error becomes an event in metrics.jsonl, for whoever asks why a run has ended."""
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, TrainyardError | OSError) else repr(error)
        if trainer.world.is_first:
            trainer.append(FAILED[0], without_secrets(text), check)
        raise


class Trainer:
    """Trains the parts of a run in its directory, which is claimed.

    A part that the recipe leaves out does nothing; none is missing.
    """

    def __init__(self, parts: Parts, sinks: Loggers, watchdog: Watchdog, new_end: str = "") -> None:
        """`new_end`: see take_end."""
        config, world, course = parts.config, parts.world, parts.course
        self.parts, self.config, self.world, self.course = parts, config, world, course
        self.sinks, self.watchdog, self.heartbeat = sinks, watchdog, watchdog.heartbeat
        self.new_end = new_end
        peak = peak_flops(parts.device, config.batch.precision)
        ideal_s = ideal_seconds(course, parts.model, peak, channels=config.data.channels)
        self.averager = parts.averager
        self.wrapped = self.averager.wrap(parts.model.train())
        self.state = build_state(parts)
        self.averager.register_emas(self.state.emas)
        with together(world):
            self.quarantine = Quarantine(
                parts.folder.quarantine,
                world=world,
                max_bad=config.data.max_bad,
                num_samples={"train": len(parts.data.train), "val": len(parts.data.val)},
            )
        self.log_every = course.every(config.run.log_every)
        self.eval_every = course.every(config.run.eval_every)
        eta = Eta(course, self.eval_every)
        count_bad = partial(self.quarantine.count, "train")
        self.report = Reporter(sinks.write, self.state, course, count_bad, eta)
        self.report_training: Callable[[Report], None] = self.report
        if world.is_first and (minutes := config.watch.bounds_minutes):
            self.report_training = Bounds(self.report, parts.clock, every_s=60 * minutes)
        self.meter = Meter(
            world,
            parts.device,
            parts.clock,
            lambda: ideal_s(self.state.step - 1),
            has_top1=not self.state.has_lists,
            add_up=self.averager.add_up,
        )

    # --- from the start or a checkpoint to the end or a stop ---

    def train(self) -> Outcome:
        """The last checkpoint is complete when it returns."""
        if self._resumed():
            return replace(self._outcome(None), was_complete=True)
        data, folder = self.parts.data, self.parts.folder
        self.feeds = build_feeds(self.config, self.world, self.parts.device)
        train_step = self._step()
        self.saver = self._saver()
        profile = self.config.watch.profile if self.world.is_first else None
        with (
            StopSignal(self.world, self.state.guard.lag, self.saver) as self.stop,
            self.saver,  # inside: a launcher that misses a rank signals one that saves
            self.feeds.training(
                data.train,
                self.parts.order,
                self.course,
                resume_state=self.state.stream,
                report=self.report,
            ) as self.feed,
            self.feeds.evaluations(data.val) as self.kept,
            profiling(profile, self.state.step, folder.path / "profile", self.report) as profiled,
            self.watchdog.attributing_errors(),
        ):
            self.feed.seek(self.state.step, self.state.skipped)
            self.train_step = profiled(train_step)
            self.find_micro_batch = build_micro_search(
                self.config,
                self.state,
                train_step,
                course=self.course,
                report=self.report,
            )
            save_every, by_time = self.config.run.save_every, self.saver.every_s is not None
            # Ranks decide saves by time together, like stops.
            due: Due = self.stop if by_time else self.course.every(save_every)
            self.save_every = self.feed.saving(due)
            stopped = self._trained()
        return self._outcome(stopped)

    def _trained(self) -> type[Stopped] | None:
        """The reason of a stop, or None. An evaluation that it cuts off is repeated later."""
        try:
            stopped = self.loop()
        except Stopped as reason:
            self.save()
            stopped = type(reason)
        with self.phase("save"):
            self.saver.wait()
        return stopped

    def loop(self) -> type[Stopped] | None:
        """Trains to the last step, or until a stop request: then returns its reason.

        The order of the lines is a contract. A step is counted before it is reported or saved, so
        every report and checkpoint of step N is about N whole updates. An evaluation comes before
        the save that records it; a resumed run repeats an evaluation that a stop cut off. No batch
        is fetched between a step and its checkpoint: after a resume, the first batch is that of the
        saved step. Bad samples are written down before a checkpoint: a run resumed from it would
        not meet them again in this epoch. If gradients stay non-finite, the weights return to a
        checkpoint and the data continues. That decision is made before a step and from saved state
        alone, so an interrupted run rolls back where an uninterrupted one would.
        """
        state = self.state
        if self.evaluation_is_due():
            self.evaluate()
            self.save()
        while not self.is_over():
            if state.guard.tripped(state.step):
                self.roll_back()
            with self.phase("data"):
                batch = next(self.feed)
            self.find_micro_batch(batch, state.step)
            rates = self.parts.schedule(state.step)
            stats = self.train_step(batch, state.step, rates)
            state.step += 1
            state.guard.add(stats.skipped)
            self.meter.add(stats, batch.capacity)
            self.quarantine.note("train", batch.bad)
            stopped = self.stop.poll(state.guard.told(state.step))
            state.guard.hear(self.stop.highest)
            is_last = self.is_over()
            save_is_due = self.save_every.due(state.step) or is_last or stopped
            if self.log_every.due(state.step) or save_is_due:
                self.quarantine.exchange()
                self.report_training({"kind": "train", **rates._asdict(), **self.meter.report()})
            is_best = not stopped and self.evaluation_is_due() and self.evaluate()
            if save_is_due or is_best or self.is_over():
                self.save()
            if stopped:
                return stopped
        return None

    def is_over(self) -> bool:
        """True if no step is left, or no patience; alike on all ranks."""
        return self.feed.is_over(self.state.step) or self.has_lost_patience()

    def has_lost_patience(self) -> bool:
        """True after `run.patience` evaluations without a better one."""
        patience = self.config.run.patience
        return patience is not None and self.state.stale >= patience

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A timed phase. Data belongs to the next step, evaluations and saves to the last one."""
        state, is_data = self.state, name == "data"
        self.heartbeat.mark(name, state.step + is_data)
        with state.clock.phase(name), self.stop.waiting_for_data() if is_data else nullcontext():
            yield
        self.heartbeat.mark("step", state.step + 1)

    # --- evaluation ---

    def evaluation_is_due(self) -> bool:
        """True if an evaluation follows the current step."""
        step, last = self.state.step, self.state.last
        if not step:
            return self.config.model.linear_probe and not last
        is_done = step == last.get("step", 0)
        return not is_done and (self.eval_every.due(step) or self.feed.is_over(step))

    def evaluate(self) -> bool:
        """Evaluates the consensus and reports it; True if it is the best so far."""
        state, probe = self.state, self.state.last.get(PROBE)
        with self.phase("eval"), self.averager.consensus():
            state.last = {"step": state.step, **self._evaluation(), **self.averager.metrics()}
        if not state.step:
            probe = score(state.last, state.best_by)
        state.last |= {} if probe is None else {PROBE: probe}
        self.quarantine.exchange()
        value, best = score(state.last, state.best_by), score(state.best, state.best_by)
        is_best = value >= best  # of equal ones the last, which has learned longer
        state.stale = 0 if value > best else state.stale + 1
        if is_best:
            state.best = state.last
        self.report({"kind": "val", **state.last, "evaluated": state.last["samples"]})
        if self.has_lost_patience() and not self.feed.is_over(state.step):
            message = f"ends at step {state.step:,}: {without_better(state.stale, state.best_by)}"
            self.report({"kind": "event", "event": ENDED_EARLY, "message": message})
        return is_best

    def _evaluation(self) -> Report:
        """The val report of the weights and, under ema_…, of their moving averages."""
        state, data, world, by = self.state, self.parts.data, self.world, self.config.run.best_by
        models = {"": state.model} | {prefix_of(name): ema for name, ema in state.emas.items()}
        with evaluation_weights(state.optimizer):
            if state.step:  # before it they are those of the initial weights, as a probe had them
                reestimate_bn_statistics(
                    self.config, self.feeds, data, self.course, models=[*models.values()]
                )
            with self.kept.one() as feed:
                batches = counted(feed, self.config.batch.size, len(data.val), self._on_evaluated)
                predictions = predict(self.config, self.feeds, batches, models, index=data.val)
        labels = labels_of(data.val, len(state.classes))
        report = with_best_average(summary(predictions, labels), [*state.emas], by)
        # The first rank's: another processor may round another way, and all must agree on the best.
        report = broadcast(world, report)
        with together(world):
            if world.is_first and score(report, by) >= score(state.best, by):
                # Equal scores go to an average, the first one, as in `with_best_average`.
                prefixes = [*map(prefix_of, state.emas), ""]
                best = max(prefixes, key=lambda prefix: float(report[f"{prefix}{by}"]))
                path = self.parts.folder.predictions
                record(path, state.step, labels, predictions[best], weights=best)
        return report

    def _on_evaluated(self, batch: Batch, count: int) -> None:
        self.heartbeat.mark("eval", self.state.step)
        self.quarantine.note("val", batch.bad)
        self.sinks.show_evaluation(count, len(self.parts.data.val))
        self.stop.check()

    # --- checkpoints ---

    def save(self) -> None:
        """Save a checkpoint of the consensus, in a timed phase."""
        with self.phase("save"), self.averager.consensus():
            self.state.guard.share_count()
            self.saver.save(self.state)
            self.stop.saved()

    def roll_back(self) -> None:
        """Return the weights to a checkpoint, and go on with the data."""
        self.heartbeat.mark("roll back", self.state.step)
        self.saver.wait()
        roll_back(
            self.parts.folder,
            self.state,
            feed=self.feed,
            course=self.course,
            limit=self.config.run.max_roll_backs,
            world=self.world,
            report=self.report,
        )
        self.heartbeat.mark("step", self.state.step + 1)

    def _resumed(self) -> bool:
        """Load the run's checkpoint, if there is one. True if no step and no evaluation is left.

        Nothing is reported then: the run does not go on. Otherwise its head is.
        """
        resume(
            self.config.run.resume,
            self.parts.folder,
            self.state,
            world=self.world,
            report=lambda event: None if self._is_complete() else self.report(event),
        )
        with together(self.world):
            check_end(self.course, self.state.step, self.state.stream)
        if self.new_end:
            self.report({"kind": "event", "event": "new end", "message": self.new_end})
        if not self._is_complete():
            self._report_head()
        return self._is_complete()

    def _report_head(self) -> None:
        """The first rank's alone: with --all-ranks each has a console."""
        if not self.world.is_first:
            return
        parts = self.parts
        for event in run_summary(
            self.config,
            parts.data,
            self.course,
            model=parts.model,
            initial=parts.initial,
            world=self.world,
            device=parts.device,
            step=self.state.step,
        ):
            self.report(event)
        for message in parts.initial.log:
            self.report({"kind": "event", "event": "initial weights", "message": message})

    def _is_complete(self) -> bool:
        state = self.state
        is_over = state.step >= self.course.num_steps
        if self.config.data.order == "join":
            is_over = passes_are_over(self.course, state.step, state.stream.get("ends", []))
        is_over = is_over or self.has_lost_patience()
        return is_over and state.last.get("step") == state.step

    # --- parts ---

    def _step(self) -> TrainStep:
        config, model = self.config, self.parts.model
        if config.model.compile == "auto":
            mode = build_mode(config, model, self.parts.device)
            message = f"model.compile = 'auto' takes {mode.name!r}: {mode.reason}"
            self.report(
                {"kind": "event", "event": "compile", "mode": mode.name, "message": message}
            )
        return build_step(
            config,
            self.state,
            self.wrapped,
            loss=self.parts.loss,
            world=self.world,
            ema=self.parts.ema,
        )

    def _saver(self) -> Saver:
        saver = Saver(
            self.parts.folder.checkpoints,
            self.world,
            keep=self.config.run.keep,
            all_write=self.averager.replica.differs,
            every_s=seconds_of(self.config.run.save_every),
        )
        self.watchdog.before_end, self.watchdog.record = saver.join, self._record_loss
        return saver

    def _record_loss(self, event: str, reason: str) -> str:
        """The reason why all ranks end, with the step from which the run resumes; see `append`."""
        latest = self.parts.folder.checkpoints / "latest"
        how = f"resumes from {latest.resolve().name}" if latest.exists() else "starts again"
        message = f"{reason}; the same command {how}"
        self.append(event, message)
        return message

    def append(self, event: str, message: str, check: Callable[[], None] = lambda: None) -> None:
        """Append a warning to metrics.jsonl, from any rank: the first one may be lost.

        Nothing happens if the disk is full, or the directory is another run's by now.
        """
        with suppress(OSError, TrainyardError):
            write = JsonLinesSink(self.parts.folder.metrics, check).write
            replace(self.report, write=write).warn(event, message)

    def _outcome(self, stopped: type[Stopped] | None) -> Outcome:
        state = self.state
        return Outcome(
            run=str(self.parts.folder.path),
            step=state.step,
            seconds=state.clock.total,
            last=state.last,
            best=state.best,
            stopped=stopped,
            best_by=state.best_by,
            stale=state.stale if self.has_lost_patience() else 0,
        )
