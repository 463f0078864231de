"""Asynchronous checkpoints: a thread writes them while training continues."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from trainyard.errors import PeerError
from trainyard.files import WRITER
from trainyard.training import keeping
from trainyard.training.checkpoint import Snapshot, TrainState, snapshot
from trainyard.training.host_memory import HostCopies
from trainyard.world import World, new_group, together

_LOOK_S = 0.5
_LEAVE_S = 300  # for a pending checkpoint after an error; launchers wait as long
_LOST_S = 5  # the same if ranks write together and one is lost


class Saver:
    """Writes the checkpoints of a run, one at a time.

    `save` copies the state to the host and returns; a thread writes the copy. `wait` returns once
    the checkpoint is complete on disk. All ranks make the same calls.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        keep: int,
        all_write: bool = False,
        every_s: float | None = None,
    ) -> None:
        """`all_write`: each rank has a part of its own to write; else the first rank writes all.

        `every_s`: seconds after which a checkpoint is due, if saves depend on time.
        """
        self._folder, self._keep, self._every_s = folder, keep, every_s
        self._world = self._writers = world
        self._all_write = all_write
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._written = threading.Event()
        self._written.set()
        self._error: BaseException | None = None
        self._num_parts = 0
        self._begun = time.monotonic()

    def __enter__(self) -> "Saver":
        if not self._all_write:
            self._writers = World()
        elif self._world.size > 1:
            # A group of its own keeps its messages apart from those of training.
            self._writers = replace(self._world, group=new_group(backend="gloo"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, Exception):  # not after a second Ctrl-C
            self.join(is_lost=isinstance(error, PeerError))

    def join(self, *, is_lost: bool = True) -> None:
        """Wait for a pending checkpoint, at most 300 s, or 5 s if `is_lost`: a rank is gone."""
        if self._thread is not None:
            self._thread.join(_LOST_S if is_lost and self._writers.size > 1 else _LEAVE_S)

    @property
    def thread(self) -> int | None:
        """Id of the thread that writes a pending checkpoint, or None."""
        return None if self._thread is None or self._written.is_set() else self._thread.ident

    @property
    def has_failed(self) -> bool:
        """True if a checkpoint could not be written; `wait` raises the reason."""
        return self._error is not None

    @property
    def by_time(self) -> bool:
        """True if checkpoints are due by time, not by step."""
        return self._every_s is not None

    @property
    def is_overdue(self) -> bool:
        """True if `every_s` has passed since the last save, by the first rank's clock."""
        if self._every_s is None or not self._world.is_first:
            return False
        return time.monotonic() - self._begun >= self._every_s

    def save(self, state: TrainState) -> None:
        """Start a save once the last one is done; call it inside the averager's consensus."""
        self.wait()
        with together(self._world):
            taken = snapshot(state, self._world, self._copies)
        self._begun = time.monotonic()
        if self._all_write or self._world.is_first:
            self._written.clear()
            self._thread = threading.Thread(
                target=self._write, args=(taken,), name=WRITER, daemon=True
            )
            self._thread.start()

    def wait(self, progress: Callable[[], None] = lambda: None) -> None:
        """Wait for a pending checkpoint; `progress` is called as its parts are written.

        If it could not be written, raises the reason on all ranks.
        """
        with together(self._world):
            seen = self._num_parts
            while not self._written.wait(_LOOK_S):
                if seen != self._num_parts:
                    seen = self._num_parts
                    progress()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def _write(self, taken: Snapshot) -> None:
        try:
            keeping.write_checkpoint(
                taken, self._folder, keep=self._keep, world=self._writers, progress=self._count
            )
        except BaseException as error:
            self._error = error
        finally:
            self._written.set()

    def _count(self) -> None:
        self._num_parts += 1
