"""What a process has of those before it: it ends with its parent, and puts back handlers."""

import ctypes
import os
import signal

TYPE_CHECKING = False  # typing takes longer to import than this module
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LAUNCHER = "TRAINYARD_LAUNCHER"
"""Variable with the pid of the Trainyard process that started a rank."""
STARTS_BEFORE = "TRAINYARD_STARTS_BEFORE"
"""Variable with the number of starts of a run before this one, where torch's agent counts none."""
FIRST_RUN = "TRAINYARD_FIRST_RUN"
"""Variable with metrics.jsonl of a sweep's first run; others show what differs from its head."""
_LAUNCHERS = {LAUNCHER, "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"}
_PR_SET_PDEATHSIG = 1  # see prctl(2)


def starts_before() -> int:
    """How often launchers have started this run before."""
    texts = (os.environ.get(name, "") for name in (STARTS_BEFORE, "TORCHELASTIC_RESTART_COUNT"))
    return sum(int(text) for text in texts if text.isdecimal())


def has_launcher() -> bool:
    """True if this process is a rank that Trainyard, torchrun or mpirun has started."""
    return not _LAUNCHERS.isdisjoint(os.environ)


def signal_without_parent(number: int) -> None:
    """Have this process get a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_launcher() -> None:
    """Make a rank save and end if its launcher, torchrun or mpirun is killed."""
    if not has_launcher():
        return
    signal_without_parent(signal.SIGTERM)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):  # the launcher is gone already
        os.kill(os.getpid(), signal.SIGTERM)


def put_back_handlers(before: "Mapping[int, Any]") -> None:
    """Restore what `signal.signal` gave; None, one that is not Python's, becomes the default."""
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
