"""Ctrl-C before a command handles it by itself. It imports next to nothing, as it comes first."""

import _thread
import os
import signal
import sys
import time

TYPE_CHECKING = False  # typing itself takes longer to import than all else here
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

were_raised = False
"""True once a Ctrl-C has become an exception: Python drops those of finalizers, libraries of C some
others, and a run that begins nevertheless is to stop.
"""


def raise_interrupt(number: int, frame: "FrameType | None") -> None:
    """As Python does by default, but not inside the import of torch: its C++ would abort."""
    if is_postponed(number, frame):
        return
    torch = sys.modules.get("torch")
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        end_interrupted()
    global were_raised
    were_raised = True
    raise KeyboardInterrupt


def end_interrupted(number: int = signal.SIGINT, frame: object = None) -> "NoReturn":
    try:
        os.write(2, b"trainyard: interrupted\n")
    finally:
        os._exit(130)  # as Stopped.exit_code, which is not imported yet


def is_postponed(number: int, frame: "FrameType | None") -> bool:
    """True if an exception would be lost here; the signal then comes once more, a little later.

    An import ends with a callback of its lock, and Python prints and drops what is raised there.
    """
    if frame is None or frame.f_code.co_name != "cb":
        return False
    is_lost = frame.f_code.co_filename == "<frozen importlib._bootstrap>"
    if is_lost:
        _thread.start_new_thread(_send_again, (number,))
    return is_lost


def _send_again(number: int) -> None:
    time.sleep(0.01)
    os.kill(os.getpid(), number)
