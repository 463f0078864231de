"""Child processes, each the leader of a process group, that end with their whole group.

A pid stays unique until its process is reaped. A later signal to its group might reach another
group, so nothing here reaps a process before killing it.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

SAFE_PATH = ("-P",)
"""Options of Python: no file of the working directory is imported in place of a module."""
_OWN = ("PYTHONSAFEPATH", "trainyard")  # as __main__.py sets it
_LOOK_S = 0.01


def users_environment() -> dict[str, str]:
    """The environment of a command of the user's: it may import the modules beside its script."""
    return dict(pair for pair in os.environ.items() if pair != _OWN)


def has_ended(process: "subprocess.Popen[Any]", timeout_s: float = 0) -> bool:
    """True if a process ends within `timeout_s`. It is not reaped."""
    give_up_at = time.monotonic() + timeout_s
    while process.returncode is None and not _is_zombie(process):
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(_LOOK_S)
    return True


def _is_zombie(process: "subprocess.Popen[Any]") -> bool:
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # this process lets the system reap its children
        return True


def wait_for(process: "subprocess.Popen[Any]") -> None:
    """Wait for the end of a process without reaping it."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def kill_group(process: "subprocess.Popen[Any]") -> None:
    """Send SIGKILL to a process and its group, unless it has been reaped. Does not wait."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
