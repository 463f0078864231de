"""The activity of a rank, as a thread beside the training thread sees it."""

import gc
import linecache
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
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

    def activity(self) -> Activity:
        frames = _frames()
        frame = frames.get(self._worker or self._thread, frames.get(self._thread))
        step, doing, since = self._marked
        has_begun = step > self._first_step > 0
        usual_s = self.limit_s * (1 if has_begun else BEGINNING)
        return Activity(
            step,
            doing,
            time.monotonic() - since,
            self.limits_of.get(doing, usual_s) if usual_s else 0,
            "" if frame is None else _place_of(frame),
            frame is not None and _waits(frame),
        )


def _frames() -> dict[int, FrameType]:
    """The frame of each thread. No garbage is collected meanwhile: in Python 3.11 that could end in
    a deadlock with a thread that wants the interpreter's lock (cpython issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _waits(frame: FrameType) -> bool:
    """True if a thread is in torch.distributed, in autograd, or in a line that waits."""
    for outer in _from(frame):
        file = outer.f_code.co_filename
        if any(part in file for part in _WAITING_IN):
            return True
        if _TORCH not in file and not _is_library(file):
            line = linecache.getline(file, outer.f_lineno or 0)  # some instructions have no line
            return bool(_WAITING_LINE.search(line))
    return False


def _place_of(frame: FrameType) -> str:
    """The innermost line outside of Python's standard library."""
    code = next((f for f in _from(frame) if not _is_library(f.f_code.co_filename)), frame)
    return f"{code.f_code.co_filename}:{code.f_lineno} in {code.f_code.co_name}"


def _is_library(file: str) -> bool:
    is_installed = file.startswith((_PATHS["purelib"], _PATHS["platlib"]))
    return file.startswith(("<frozen", _PATHS["stdlib"])) and not is_installed


def _from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
