"""Where a rank is: its host and process, so that others can name it and look for it."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    host: str
    space: str  # in which its number counts: containers have their own
    process: int
    started: str  # to tell it from a later one of the same number

    @classmethod
    def mine(cls) -> "Place":
        state = _state_of(os.getpid())
        assert state is not None
        return cls(socket.gethostname(), os.readlink("/proc/self/ns/pid"), os.getpid(), state[1])

    def is_seen_to_be_gone(self, here: "Place") -> bool:
        """Whether it has ended; from another host nothing can be seen."""
        if not self._is_near(here):
            return False
        state = _state_of(self.process)
        return state is None or state[0] in "ZX" or state[1] != self.started

    def kill_if_stopped(self, here: "Place") -> None:
        """A stopped process (SIGSTOP) cannot end by itself; on another host nothing can be done."""
        state = _state_of(self.process) if self._is_near(here) else None
        if state is not None and state[0] in "Tt" and state[1] == self.started:
            with suppress(OSError):
                os.kill(self.process, signal.SIGKILL)

    def _is_near(self, here: "Place") -> bool:
        return (self.host, self.space) == (here.host, here.space)

    def __str__(self) -> str:
        return f"{self.host}, process {self.process}"


def _state_of(process: int) -> tuple[str, str] | None:
    """Of a process its state and when it started; see proc(5), stat."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]
