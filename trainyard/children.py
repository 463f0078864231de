"""Processes that this one has started, each the leader of a group, ended with all of their group.

The number of a process is its own until it is reaped. A signal to its group after that may reach
another group, so nothing here reaps before it kills.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

_LOOK_S = 0.01


def has_ended(process: "subprocess.Popen[Any]", timeout_s: float = 0) -> bool:
    """Whether a process ends within so many seconds. It is not reaped."""
    give_up_at = time.monotonic() + timeout_s
    while process.returncode is None and not _is_zombie(process.pid):
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(_LOOK_S)
    return True


def _is_zombie(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # this process leaves its children to the system
        return True


def kill_group(process: "subprocess.Popen[Any]") -> None:
    """SIGKILL to a process and all of its group, unless it has been reaped. Does not wait."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
