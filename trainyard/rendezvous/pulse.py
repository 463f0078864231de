"""What a rank is doing, since when, and where it stands: seen from a thread beside it."""

import linecache
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

BEGINNING = 4
"""So many times as long a rank may be silent before its first step is made: it reads indexes,
fetches weights and compiles."""

_PATHS = sysconfig.get_paths()
_TORCH = "-packages/torch/"  # of site or dist: an environment may lie in a folder named torch
_WAITING_IN = (f"{_TORCH}distributed/", f"{_TORCH}autograd/")  # the gradient's way to the others
_WAITING_LINE = re.compile(
    r"\.wait\(\)|synchronize\(|all_reduce|all_gather|gather\(|barrier\(|broadcast"
    r"|_under_way\(\)|\.item\(\)|\.tolist\(\)|\.cpu\(\)"
)


class Sighting(NamedTuple):
    """A rank at some moment."""

    step: int = 0
    doing: str = "start"
    silent_s: float = 0.0
    """Since it made progress."""
    limit_s: float = 0.0
    """How long it may be silent; 0: for ever."""
    where: str = ""
    waits: bool = False
    """Whether it waits for others, or for its GPU, which may."""

    @property
    def is_overdue(self) -> bool:
        return 0 < self.limit_s < self.silent_s

    def later(self, seconds: float) -> "Sighting":
        return self._replace(silent_s=self.silent_s + seconds)


class Pulse:
    """Marked by the thread that trains, whenever it has made progress."""

    def __init__(self) -> None:
        self.limit_s = 0.0
        self.limits_of: dict[str, float] = {}
        """Seconds for what has a limit of its own, by what it is called in a mark; 0: for ever."""
        self._thread = threading.get_ident()
        self._worker: int | None = None  # a thread for which this one waits
        # The step, what is done and since when, in one: another thread may read it at any time.
        self._marked = 0, "start", time.monotonic()
        self._first_step = 0  # whose data this process has asked for

    def mark(self, doing: str, step: int = 0) -> None:
        """`step`: the one under way; of what comes after a step, that step."""
        self._first_step = self._first_step or step * (doing == "data")
        self._marked = step, doing, time.monotonic()

    def again(self) -> None:
        """Progress in what was marked last."""
        step, doing, _ = self._marked
        self.mark(doing, step)

    def counted(self, doing: str, show: Callable[[int], None]) -> Callable[[int], None]:
        """`show`, to which a count goes: each is a mark of progress."""

        def mark_and_show(count: int) -> None:
            self.mark(doing)
            show(count)

        return mark_and_show

    def forgive(self) -> None:
        """It could make no progress: the whole process was stopped."""
        step, doing, _ = self._marked
        self._marked = step, doing, time.monotonic()

    def busy_s(self) -> float:
        """Processor time that the thread has taken."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread))

    @contextmanager
    def following(self, thread: int | None) -> Iterator[None]:
        """Inside, the thread that trains waits for another: where that one stands counts."""
        self._worker = thread
        try:
            yield
        finally:
            self._worker = None

    def look(self) -> Sighting:
        frames = sys._current_frames()
        frame = frames.get(self._worker or self._thread, frames.get(self._thread))
        step, doing, since = self._marked
        has_begun = step > self._first_step > 0
        usual_s = self.limit_s * (1 if has_begun else BEGINNING)
        return Sighting(
            step,
            doing,
            time.monotonic() - since,
            self.limits_of.get(doing, usual_s) if usual_s else 0,
            "" if frame is None else _place_of(frame),
            frame is not None and _waits(frame),
        )


def _waits(frame: FrameType) -> bool:
    """Whether a thread is inside torch where that speaks to others, or in a line that waits."""
    for outer in _from(frame):
        file = outer.f_code.co_filename
        if any(part in file for part in _WAITING_IN):
            return True
        if _TORCH not in file and not _is_library(file):
            line = linecache.getline(file, outer.f_lineno or 0)  # some instructions have no line
            return bool(_WAITING_LINE.search(line))
    return False


def _place_of(frame: FrameType) -> str:
    """The innermost line that is not Python's own library's."""
    code = next((f for f in _from(frame) if not _is_library(f.f_code.co_filename)), frame)
    return f"{code.f_code.co_filename}:{code.f_lineno} in {code.f_code.co_name}"


def _is_library(file: str) -> bool:
    is_installed = file.startswith((_PATHS["purelib"], _PATHS["platlib"]))
    return file.startswith(("<frozen", _PATHS["stdlib"])) and not is_installed


def _from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
