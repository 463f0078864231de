"""The processes of its ranks on one host.

    shares = shares_of(job.command, {"a": 4, "b": 4}, address="10.0.0.1", port=29500)
    ranks = Ranks(shares["b"], events.put)     # on host b
    ranks.signal(signal.SIGUSR1)
    ranks.stop(GRACE_S)

torch's `start_processes` does less: it ends the other ranks at once when one has died and tells of
the death only after the last has ended, passes no signals on, and needs torch, with 0.5 GB of
memory, in the agent of every host.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from trainyard.children import kill_group, wait_for
from trainyard.parent import LAUNCHER

_READ_S = 10  # to read a rank's last output; a process that left its session may hold the pipe open


@dataclass(frozen=True)
class Share:
    """The ranks of one host, and the meeting point of all ranks. Plain data, to go through JSON."""

    command: Sequence[str]
    first: int
    """Rank of the first process here; the others follow."""
    count: int
    size: int
    """World size."""
    node: int
    num_nodes: int
    address: str
    port: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of every rank."""

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)

    def environment(self, local_rank: int) -> dict[str, str]:
        """A rank's variables on top of the environment of this process."""
        place = {
            "RANK": self.first + local_rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.count,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        # The output is a pipe, even if a notebook has forced colours.
        usual = {"PYTHONUNBUFFERED": "1", "FORCE_COLOR": ""}
        return {**usual, **self.variables, **{name: str(value) for name, value in place.items()}}


def shares_of(
    command: Sequence[str],
    counts: Mapping[str, int],
    *,
    address: str,
    port: int,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Share]:
    """The share of each host. `counts`: ranks by host; ranks are numbered host by host."""
    size, first, shares = sum(counts.values()), 0, {}
    for node, (host, count) in enumerate(counts.items()):
        place = (first, count, size, node, len(counts), address, port)
        shares[host] = Share(command, *place, variables or {})
        first += count
    return shares


@dataclass(frozen=True)
class Line:
    """A line of output of a rank, without its end."""

    rank: int
    text: str
    is_error: bool = False
    """True if the rank wrote it to stderr."""


@dataclass(frozen=True)
class End:
    rank: int
    code: int
    """Exit code, or minus the signal that killed the rank."""


class Ranks:
    """The processes of a share, each in a session of its own.

    They save and end if this process is killed or the thread that made this object ends, so that
    thread must outlive them. `put` is called from other threads: for each rank with its lines in
    order, then with its end, once its whole session has ended.
    """

    def __init__(self, share: Share, put: Callable[[Line | End], None]) -> None:
        """OSError if the command cannot be started; ranks already started are killed."""
        self._put = put
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()  # held to signal a process, and to reap it
        try:
            for local_rank, rank in enumerate(share.ranks):
                self._processes[rank] = _start(share, local_rank)
        except OSError:
            for process in self._processes.values():
                with process:  # closes its pipes
                    kill_group(process)
            raise
        processes = self._processes.items()
        self._threads = [threading.Thread(target=self._follow, args=item) for item in processes]
        for thread in self._threads:
            thread.start()

    def signal(self, number: int) -> None:
        """Send a signal to each rank that runs."""
        with self._lock:
            for process in self._processes.values():
                if process.returncode is None:
                    os.kill(process.pid, number)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of all ranks. True if all have ended and been reported in time."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if deadline is None else max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL to ranks that are left after `grace_s`. Waits for all."""
        self.signal(signal.SIGTERM)
        if not self.wait(grace_s):
            self.signal(signal.SIGKILL)
            self.wait()

    def _follow(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        def read(stream: IO[bytes], is_error: bool) -> None:
            with stream:
                for line in stream:
                    text = line.decode(errors="replace").rstrip("\r\n")
                    self._put(Line(rank, text, is_error))

        assert process.stdout and process.stderr
        streams = ((process.stdout, False), (process.stderr, True))
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        # WNOWAIT does not reap the process, so its pid is not reused.
        wait_for(process)
        with self._lock:
            kill_group(process)
            code = process.wait()
        for reader in readers:
            reader.join(_READ_S)
        self._put(End(rank, code))


def _start(share: Share, local_rank: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        share.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | share.environment(local_rank) | {LAUNCHER: str(os.getpid())},
        start_new_session=True,
    )
