"""The activity of a rank, as a thread beside the training thread sees it."""

import gc
import linecache
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec

P = ParamSpec("P")

BEGINNING = 4
"""Factor on the limit before the first step is done: a rank reads indexes and compiles."""

_PATHS = sysconfig.get_paths()
_TORCH = (
    "-packages/torch/"  # site- or dist-packages: an environment may lie in a folder named torch
)
_WAITING_IN = (f"{_TORCH}distributed/", f"{_TORCH}autograd/")  # autograd averages gradients
_WAITING_LINE = re.compile(
    r"\.wait\(\)|synchronize\(|all_reduce|all_gather|gather\(|barrier\(|broadcast"
    r"|_under_way\(\)|\.item\(\)|\.tolist\(\)|\.cpu\(\)"
)


class Activity(NamedTuple):
    """A rank at one moment."""

    step: int = 0
    doing: str = "start"
    silent_s: float = 0.0
    """Time since the last progress."""
    limit_s: float = 0.0
    """Largest `silent_s` that is allowed; 0: any."""
    where: str = ""
    waits: bool = False
    """True if the rank waits for other ranks, or for its GPU, which may wait for them."""

    @property
    def is_overdue(self) -> bool:
        return 0 < self.limit_s < self.silent_s

    def later(self, seconds: float) -> "Activity":
        return self._replace(silent_s=self.silent_s + seconds)


class Heartbeat:
    """Progress marks of the training thread."""

    def __init__(self) -> None:
        self.limit_s = 0.0
        self.limits_of: dict[str, float] = {}
        """Limits in seconds of activities that have their own, by the name in a mark; 0: none."""
        self._thread = threading.get_ident()
        self._worker: int | None = None  # a thread for which this one waits
        # Step, activity and time in one tuple, since another thread reads it at any time.
        self._marked = 0, "start", time.monotonic()
        self._first_step = 0  # the first step of this process

    def mark(self, doing: str, step: int = 0) -> None:
        """`step`: the step under way, or the last one for an activity between steps."""
        self._first_step = self._first_step or step * (doing == "data")
        self._marked = step, doing, time.monotonic()

    def again(self) -> None:
        """Mark progress in the last activity."""
        step, doing, _ = self._marked
        self.mark(doing, step)

    def counted(self, doing: str, show: Callable[P, None]) -> Callable[P, None]:
        """Wrap `show`, which receives a count: each call also marks progress."""

        def mark_and_show(*args: P.args, **kwargs: P.kwargs) -> None:
            self.mark(doing)
            show(*args, **kwargs)

        return mark_and_show

    def forgive(self) -> None:
        """Restart the clock: the whole process was stopped and could make no progress."""
        step, doing, _ = self._marked
        self._marked = step, doing, time.monotonic()

    def busy_s(self) -> float:
        """Processor time of the training thread."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread))

    @contextmanager
    def following(self, thread: int | None) -> Iterator[None]:
        """Inside, the training thread waits for another thread, whose position counts instead."""
        self._worker = thread
        try:
            yield
        finally:
            self._worker = None

    @property
    def usual_limit_s(self) -> float:
        """The limit of an activity that has none of its own."""
        has_begun = self._marked[0] > self._first_step > 0
        return self.limit_s * (1 if has_begun else BEGINNING)

    def activity(self) -> Activity:
        lines = _stack(self._thread, self._worker)
        usual_s = self.usual_limit_s
        step, doing, since = self._marked
        return Activity(
            step,
            doing,
            time.monotonic() - since,
            self.limits_of.get(doing, usual_s) if usual_s else 0,
            _place_of(lines) if lines else "",
            _waits(lines),
        )


class _Line(NamedTuple):
    """The line that a function of a thread executes."""

    file: str
    number: int
    function: str

    @property
    def is_library(self) -> bool:
        """True in Python's standard library."""
        is_installed = self.file.startswith((_PATHS["purelib"], _PATHS["platlib"]))
        return self.file.startswith(("<frozen", _PATHS["stdlib"])) and not is_installed


def _stack(thread: int, worker: int | None) -> list[_Line]:
    """The lines of a thread, innermost first: those of the worker if it exists.

    No garbage is collected meanwhile. In Python 3.11, its finalizers could hang the process, which
    holds the lock of the list of threads, or let the thread leave a frame that is being read
    (cpython issue 106883).
    """
    collects, lines = gc.isenabled(), []
    gc.disable()
    try:
        frames = sys._current_frames()
        frame = frames.get(worker or thread, frames.get(thread))
        while frame is not None:
            code = frame.f_code
            lines.append(_Line(code.co_filename, frame.f_lineno or 0, code.co_name))
            frame = frame.f_back
        frames.clear()
    finally:
        if collects:
            gc.enable()
    return lines


def _waits(lines: Sequence[_Line]) -> bool:
    """True if a thread is in torch.distributed, in autograd, or in a line that waits."""
    for line in lines:
        if any(part in line.file for part in _WAITING_IN):
            return True
        if _TORCH not in line.file and not line.is_library:
            return bool(_WAITING_LINE.search(linecache.getline(line.file, line.number)))
    return False


def _place_of(lines: Sequence[_Line]) -> str:
    """The innermost line outside of Python's standard library."""
    line = next((line for line in lines if not line.is_library), lines[0])
    return f"{line.file}:{line.number} in {line.function}"
