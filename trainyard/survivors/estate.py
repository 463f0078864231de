"""What is to outlive a rank, and how the others save it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from trainyard.errors import DiskError, PeerError
from trainyard.files import RunDirectory
from trainyard.monitor.quarantine import Bad, Quarantine
from trainyard.monitor.reporter import Reporter
from trainyard.monitor.sinks import JsonLinesSink
from trainyard.rendezvous import Watch
from trainyard.survivors.meeting import Decision, Meeting
from trainyard.training import checkpoint, keeping
from trainyard.training.checkpoint import Manifest, TrainState
from trainyard.training.sharding import is_sharded
from trainyard.training.step import TrainStep
from trainyard.world import World, is_lost_peer

_WRITE_S = 300  # for a checkpoint to be written
_SAME = "the same command goes on"


@dataclass(frozen=True)
class Estate:
    """What a run has done since its last checkpoint."""

    folder: RunDirectory
    state: TrainState
    quarantine: Quarantine
    reporter: Reporter
    step: TrainStep


@contextmanager
def outlived(estate: Estate, world: World, watch: Watch, *, keep: int) -> Iterator[None]:
    """Inside, a rank that dies ends the others: they save, and raise a PeerError that names it.

    They notice at once if its process has ended, also while they wait for one another, else when
    they next do; if its host is gone, within 10 s; if it hangs, when `watch` finds it to. One whose
    thread does not come back from a message that was cut short is saved by another thread, if it
    was not yet to change its weights. One that has not noticed 10 s after the first is left behind.

    Where replicas are equal, one that is furthest saves for all: no step is lost nor made twice,
    and its statistics of batch norm are taken for all. Where they differ each saves its own; the
    weights of the checkpoint are the mean of the survivors, its step is that of the furthest one.
    Nothing is saved where a rank keeps a part of the weights, nor on GPUs, where the host cannot
    know what became of the weights in an exchange that was cut short.
    """
    if world.size == 1:
        yield
        return
    meeting = Meeting(estate.folder, world)
    survivor = _Survivor(estate, world, watch, meeting, keep)
    if not next(estate.state.model.parameters()).is_cuda:
        watch.entrust(survivor.stand_in)
    try:
        yield
    except Exception as error:
        if getattr(error, "is_shared", False):
            raise
        if not watch.has_alarm and not is_lost_peer(error):
            with suppress(OSError):  # a full disk may be the very error
                meeting.take_leave()
            raise
        watch.alarm()
        raise survivor.divide() from error


@dataclass(frozen=True)
class _Survivor:
    """A rank that is left."""

    estate: Estate
    world: World
    watch: Watch
    meeting: Meeting
    keep: int  # checkpoints

    def divide(self) -> PeerError:
        """Save together; the error to end with, which one survivor prints for all."""
        try:
            return self._divide()
        except DiskError as error:  # in the run directory there is no room to meet
            return PeerError(f"{self.watch.reason}; nothing was saved ({error})")

    def _divide(self) -> PeerError:
        noted = self.estate.quarantine.noted
        decision = self.meeting.decide(self.estate.state.step, self.watch.hung, noted=noted)
        if self.world.rank in decision.steps:
            self._save(decision)
        try:
            outcome = self.meeting.wait_for("outcome.json", _WRITE_S)
        except TimeoutError as error:
            outcome = f"{self._cause(decision)}; nothing was saved ({error})"
        peer_error = PeerError(outcome)
        peer_error.is_shared = self.world.rank != min(decision.steps)
        return peer_error

    def stand_in(self) -> str | None:
        """As a watch's deputy."""
        if not self.estate.step.can_undo(self.watch.pulse.is_inside):
            return None
        self.estate.step.undo()
        error = self.divide()
        return "" if error.is_shared else str(error)

    def _cause(self, decision: Decision) -> str:
        names = self.meeting.names(decision.gone)
        return self.watch.verdict or f"{names} {'is' if len(decision.gone) == 1 else 'are'} gone"

    def _save(self, decision: Decision) -> None:
        """This rank's part of it; the writer leaves word of what came of it."""
        is_writer = self.world.rank == decision.writer
        what = self._why_not(decision)
        if what is None:
            who = "the others have" if decision.gone else "all have"
            what = f"{who} saved step {decision.step:,}: {_SAME} from there"
            try:
                with self.estate.state.averager.alone():
                    self._write(decision, is_writer=is_writer)
            except Exception as error:  # of files or of torch: there is no other end to come to
                what = f"what the others have done cannot be saved ({error}): {self._go_on()}"
        if is_writer:
            message = f"{self._cause(decision)}; {what}"
            self._report(message)
            self.meeting.write("outcome.json", message)

    def _why_not(self, decision: Decision) -> str | None:
        """Why there is nothing to save."""
        model = self.estate.state.model
        if is_sharded(model):
            return f"a part of the weights is gone too: {self._go_on()}"
        if next(model.parameters()).is_cuda:
            return f"of what GPUs have done since, nothing can be saved: {self._go_on()}"
        final = self._final(decision)
        if decision.step == 0 or (final.exists() and checkpoint.find_problem(final) is None):
            return self._go_on()
        return None

    def _go_on(self) -> str:
        latest = self.estate.folder.checkpoints / "latest"
        if not latest.exists():
            return "the same command begins anew"
        return f"{_SAME} from {latest.resolve().name}"

    def _final(self, decision: Decision) -> Path:
        return keeping.path_of(self.estate.folder.checkpoints, decision.step)

    def _write(self, decision: Decision, *, is_writer: bool) -> None:
        state = self.estate.state
        if state.averager.replica.differs:
            self._write_own()
        if not is_writer:
            return
        answers = self.meeting.answers()
        noted = (Bad(*bad) for rank in decision.steps for bad in answers[rank]["noted"])
        self.estate.quarantine.add(noted, writes=True)
        if not state.averager.replica.differs:
            keeping.save_checkpoint(state, self.estate.folder.checkpoints, keep=self.keep)
            return
        manifest = self._put_mean(decision)
        final = self._final(decision)
        part = keeping.begin(final)
        os.replace(self.meeting.path / "replicas", part / "replicas")
        manifest |= checkpoint.write_common(_common_of(state), part)
        keeping.finish(part, final, manifest, keep=self.keep)

    def _write_own(self) -> None:
        rank, path = self.world.rank, self.meeting.path
        states = [module.state_dict() for module in self._modules()]
        checkpoint.write_tensors(states, path / f"{rank:05d}.pt")
        taken = checkpoint.snapshot(self.estate.state, self.world)
        self.meeting.tell(".written", checkpoint.write_own(taken, path, self.world))

    def _put_mean(self, decision: Decision) -> Manifest:
        """Give the modules the mean of what the survivors have written; what else they have."""
        manifest: Manifest = {}
        for rank in decision.steps:
            manifest |= self.meeting.wait_for(f"{rank:05d}.written.json", _WRITE_S)
        files = [self.meeting.path / f"{rank:05d}.pt" for rank in decision.steps]
        saved = [torch.load(file, weights_only=True, mmap=True) for file in files]
        for number, module in enumerate(self._modules()):
            for name, tensor in module.state_dict().items():
                if tensor.is_floating_point():
                    own = [states[number][name].double() for states in saved]
                    tensor.copy_(torch.stack(own).mean(dim=0))
        for file in files:
            file.unlink()
        return manifest

    def _modules(self) -> list[nn.Module]:
        modules = (self.estate.state.model, self.estate.state.ema)
        return [module for module in modules if module is not None]

    def _report(self, message: str) -> None:
        # The first rank, which else writes for all, may be the one that is gone.
        write = JsonLinesSink(self.estate.folder.metrics).write
        event = "rank hangs" if self.watch.verdict else "rank gone"
        replace(self.estate.reporter, write=write).warn(event, message)


def _common_of(state: TrainState) -> checkpoint.Common:
    common = checkpoint.snapshot(state, World()).common
    assert common is not None
    return common
