"""Signals that end a run early, turned into one decision that all ranks share."""

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Protocol

from trainyard.early_stop import asked
from trainyard.errors import PeerError, Requeued, Stopped
from trainyard.world import World, new_group

# What each signal asks for; where ranks differ, the higher number wins.
_REQUEUE, _STOP = 1, 2
_SIGNALS = {
    signal.SIGUSR1: _REQUEUE,
    signal.SIGUSR2: _REQUEUE,
    signal.SIGTERM: _STOP,
    signal.SIGINT: _STOP,
}
# A launcher passes on the Ctrl-C that a terminal sends as well: what comes at once is one.
_IMPATIENT_S = 1.0
_DATA_S = 10.0  # how long a stop waits for data that does not come
_REASONS: dict[int, type[Stopped]] = {_REQUEUE: Requeued, _STOP: Stopped}


class Saving(Protocol):
    """A writer of checkpoints beside the loop."""

    @property
    def has_failed(self) -> bool: ...
    @property
    def is_overdue(self) -> bool: ...
    def wait(self) -> None: ...


class StopSignal:
    """While entered, signals no longer kill: they are noted, and `poll` tells all ranks alike.

    But a second Ctrl-C raises KeyboardInterrupt: no checkpoint, no waiting.
    """

    def __init__(self, world: World, lag: int = 1, saver: Saving | None = None) -> None:
        """What a rank was told is decided on `lag` steps later; by so many may ranks drift apart.

        That holds up no one in a run whose replicas do not wait for each other in every step. What
        becomes of the checkpoints of `saver` is decided in the same way.
        """
        self._world, self._lag = world, lag
        self._saver = saver
        self._save_is_due = False
        self._num_polls = 0  # since the last save
        self._wanted = 0
        self._interrupted: float | None = None  # when Ctrl-C first came
        self._waits_for_data = False
        self._overdue: threading.Timer | None = None  # reminds of what was asked for...
        self._asked = 0.0  # ... at this time
        self._previous: dict[signal.Signals, object] = {}
        self._group: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()  # messages under way and their tensors

    def __enter__(self) -> "StopSignal":
        early = asked()
        if early is not None:
            self._wanted = _REQUEUE if early is Requeued else _STOP
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        if self._world.size > 1:
            # A group of its own, so that its messages never mix with those of the gradients.
            self._group = new_group(backend="gloo")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A launcher that misses a rank signals the others, which are ending: not in mid-sentence.
        for number, handler in () if isinstance(error, PeerError) else self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._overdue is not None:
            self._overdue.cancel()
        for work, _ in self._pending if error is None else ():
            work.wait()

    def poll(self) -> type[Stopped] | None:
        """How to stop now, the same on every rank, which all call it equally often.

        What a rank was told reaches the others while they compute. Raises, on all ranks, what a
        checkpoint could not be written for.
        """
        wanted, has_failed, is_overdue = self._exchanged()
        self._num_polls += 1
        # A wish that was sent before the last save has been granted by it.
        self._save_is_due = bool(is_overdue) and self._num_polls > self._lag
        if has_failed and self._saver is not None:
            self._saver.wait()
        return _REASONS.get(wanted)

    def due(self, step: int) -> bool:
        """Whether the time to save had come at the last poll, the same on every rank."""
        return self._save_is_due

    def saved(self) -> None:
        """A checkpoint was begun, on all ranks."""
        self._num_polls = 0

    def _exchanged(self) -> list[int]:
        """How to stop, whether a checkpoint has failed, and whether one is overdue, on any rank."""
        own = [self._wanted, 0, 0]
        if self._saver is not None:
            own[1:] = [self._saver.has_failed, self._saver.is_overdue]
        if self._world.size == 1:
            return own
        import torch
        import torch.distributed as dist

        decided = [0, 0, 0]
        if len(self._pending) == self._lag:
            work, flags = self._pending.popleft()
            work.wait()
            decided = flags.tolist()
        flags = torch.tensor(own)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending.append((work, flags))
        return decided

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Inside, a stop asked for raises its reason after 10 s, in a world of one.

        Several ranks, of which some may have their data, do not decide it alike.
        """
        self._waits_for_data = True
        try:
            yield
        finally:
            self._waits_for_data = False

    def check(self) -> None:
        """poll(), within something long: raises Stopped or Requeued, on every rank alike."""
        reason = self.poll()
        if reason is not None:
            raise reason

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            self._interrupted = self._interrupted or now
            if now - self._interrupted > _IMPATIENT_S:
                raise KeyboardInterrupt  # a step may wait for a server for minutes
        self._wanted = max(self._wanted, _SIGNALS[signal.Signals(number)])
        if self._world.size > 1:
            return
        if self._overdue is None:
            self._asked = time.monotonic()
            self._overdue = threading.Timer(_DATA_S, _remind, [threading.get_ident()])
            self._overdue.daemon = True
            self._overdue.start()
        elif self._waits_for_data and time.monotonic() - self._asked >= _DATA_S:
            raise _REASONS[self._wanted]


def _remind(thread: int) -> None:
    """That a stop was asked for."""
    signal.pthread_kill(thread, signal.SIGUSR2)
