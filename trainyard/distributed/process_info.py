"""Host and process of a rank: other ranks name it, and look whether it still runs."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainyard.world import kernel

_PROC = Path("/proc")
NAMED = 8
"""Ranks that a message names; more are counted."""


class ProcessInfo(NamedTuple):
    host: str
    namespaces: str
    """Kernel, PIDs and network. Containers on one host have their own PIDs."""
    pid: int
    started: str
    """Start time, which tells the process from a later one with the same PID."""

    @classmethod
    def current(cls) -> "ProcessInfo":
        state = _state_of(os.getpid())
        assert state is not None
        namespaces = ""
        if _PROC.is_dir():
            kinds = [os.readlink(_PROC / f"self/ns/{kind}") for kind in ("pid", "net")]
            namespaces = " ".join((*kinds, kernel()))
        return cls(socket.gethostname(), namespaces, os.getpid(), state[1])

    def is_visible_from(self, other: "ProcessInfo") -> bool:
        """True if both processes are on one host and in the same namespaces."""
        return (self.host, self.namespaces) == (other.host, other.namespaces)

    def has_ended(self) -> bool:
        """True if a visible process has ended."""
        state = _state_of(self.pid)
        return state is None or state[0] in "ZX" or state[1] != self.started

    def kill_if_stopped(self) -> None:
        """Kill a visible process that is stopped (SIGSTOP), since it cannot end by itself."""
        state = _state_of(self.pid)
        if state is not None and state[0] in "Tt" and state[1] == self.started:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


def rank_name(rank: int, process: ProcessInfo) -> str:
    """rank 3 (node7, process 1234)."""
    return f"rank {rank} ({process})"


def _state_of(pid: int) -> tuple[str, str] | None:
    """State and start time of a process; see proc(5), stat. None if there is no such process."""
    if not _PROC.is_dir():  # macOS
        command = ["ps", "-o", "state=", "-o", "lstart=", "-p", str(pid)]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
        state, _, started = said.strip().partition(" ")
        return (state[0], started.strip()) if state else None
    try:
        fields = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]
