"""Host and process of a rank: other ranks name it, and look whether it still runs."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainyard.distributed.stacks import DUMP
from trainyard.world import kernel

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
        kinds = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        pid = os.getpid()
        return cls(socket.gethostname(), " ".join((*kinds, kernel())), pid, _state_of(pid)[1])

    def is_visible_from(self, other: "ProcessInfo") -> bool:
        """True if both processes are on one host and in the same namespaces."""
        return (self.host, self.namespaces) == (other.host, other.namespaces)

    def has_ended(self) -> bool:
        """True if a visible process has ended."""
        state, started = _state_of(self.pid)
        return state in "ZX" or started != self.started

    def end(self) -> None:
        """End a visible process that does not answer; it writes its stacks, even if stopped."""
        for number in (DUMP, signal.SIGCONT):
            if not self.has_ended():
                with suppress(OSError):
                    os.kill(self.pid, number)

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


def rank_name(rank: int, process: ProcessInfo) -> str:
    """rank 3 (node7, process 1234)."""
    return f"rank {rank} ({process})"


def _state_of(pid: int) -> tuple[str, str]:
    """State and start time of a process; see proc(5), stat. State X if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]
