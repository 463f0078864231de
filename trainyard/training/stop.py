"""Signals that end a run early, as one decision of all ranks."""

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist

from trainyard import interrupts
from trainyard.errors import STOPS, NotSaved, Requeued, Stopped
from trainyard.parent import put_back_handlers
from trainyard.training.saver import Saver
from trainyard.world import World, new_group

# The request of each signal; if ranks differ, the higher number wins.
_REQUEUE, _STOP = 1, 2
_SIGNALS = {number: _REQUEUE if stop is Requeued else _STOP for number, stop in STOPS.items()}
# A Ctrl-C may arrive twice, from the terminal and from a launcher: within this time it counts once.
_IMPATIENT_S = 1.0
_OVERDUE = signal.SIGALRM  # of the timer that counts the seconds that a stop waits for data
_REASONS: dict[int, type[Stopped]] = {_REQUEUE: Requeued, _STOP: Stopped}


class StopSignal:
    """While entered, signals no longer kill: they are recorded, and `poll` agrees on them.

    A second Ctrl-C raises NotSaved: no checkpoint, no waiting.
    """

    def __init__(
        self, world: World, lag: int = 1, saver: Saver | None = None, *, data_s: float = 10.0
    ) -> None:
        """A signal takes effect `lag` steps later; ranks may drift apart by as many steps.

        The lag keeps replicas from waiting for each other in every step. Failed and overdue
        checkpoints of `saver` are decided in the same way. A stop waits for data `data_s` seconds.
        """
        self._world, self._lag, self._data_s = world, lag, data_s
        self._saver = saver
        self._save_is_due = False
        self.highest = -1
        """The highest count that ranks had given to the poll `lag` polls before the last one."""
        self._num_polls = 0  # since the last save
        self._wanted = 0
        self._interrupted: float | None = None  # time of the first Ctrl-C
        self._waits_for_data = False
        self._previous: dict[int, Any] = {}
        self._group: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()  # pending all-reduces and their tensors

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            for number in _SIGNALS.keys() - ({signal.SIGHUP} if under_nohup else set()):
                self._previous[number] = signal.signal(number, self._note)
            self._previous[_OVERDUE] = signal.signal(_OVERDUE, self._give_up_data)
            if interrupts.were_raised:
                self._note(signal.SIGINT, None)
        if self._world.size > 1:
            # A group of its own keeps its messages apart from those of the gradients.
            self._group = new_group(backend="gloo")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0)  # before its signal has the default again
        put_back_handlers(self._previous)
        for work, _ in self._pending if error is None else ():
            work.wait()

    def poll(self, count: int = -1) -> type[Stopped] | None:
        """The reason to stop now, or None. Equal on every rank; all call it equally often.

        Requests of ranks, and any `count` of theirs, are exchanged during computation. Raises, on
        all ranks, the reason why a checkpoint could not be written.
        """
        wanted, has_failed, is_overdue, self.highest = self._exchanged(count)
        self._num_polls += 1
        # A save already covers a request that was sent before it.
        self._save_is_due = bool(is_overdue) and self._num_polls > self._lag
        if has_failed and self._saver is not None:
            self._saver.wait()
        return _REASONS.get(wanted)

    def due(self, step: int) -> bool:
        """True if a save was due by time at the last poll; equal on every rank."""
        return self._save_is_due

    def saved(self) -> None:
        """Record that a checkpoint was started, on all ranks."""
        self._num_polls = 0

    def _exchanged(self, count: int) -> list[int]:
        """Maxima over ranks: stop request, failed checkpoint, overdue checkpoint, count."""
        flags_here = [self._wanted, 0, 0, count]
        if self._saver is not None:
            flags_here[1:3] = [self._saver.has_failed, self._saver.is_overdue]
        if self._world.size == 1:
            return flags_here
        decided = [0, 0, 0, -1]
        if len(self._pending) == self._lag:
            work, flags = self._pending.popleft()
            work.wait()
            decided = flags.tolist()
        flags = torch.tensor(flags_here)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending.append((work, flags))
        return decided

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Inside, a requested stop raises its reason after `data_s`, in a world of one.

        With several ranks, some may have their data, so they could not decide alike.
        """
        self._waits_for_data = True
        try:
            yield
        finally:
            self._waits_for_data = False

    def check(self) -> None:
        """Poll during a long operation: raises Stopped or Requeued, on every rank alike."""
        reason = self.poll()
        if reason is not None:
            raise reason

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            self._interrupted = self._interrupted or now
            if now - self._interrupted > _IMPATIENT_S:
                raise NotSaved  # the current step may wait minutes for a server
        if self._world.size == 1 and not self._wanted:
            signal.setitimer(signal.ITIMER_REAL, self._data_s, self._data_s)
        self._wanted = max(self._wanted, _SIGNALS[signal.Signals(number)])

    def _give_up_data(self, number: int, frame: FrameType | None) -> None:
        if self._waits_for_data:
            raise _REASONS[self._wanted]
