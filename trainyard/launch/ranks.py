"""The ranks of one host as processes, for launchers with an agent on every host.

    shares = shares_of(job.command, {"a": 4, "b": 4}, address="10.0.0.1", port=29500)
    ranks = Ranks(shares["b"], on_line=print_line, on_end=note_end)     # on host b
    ranks.signal(signal.SIGUSR1)
    ranks.stop(GRACE_S)

`Share` is plain data: `dataclasses.asdict` and `Share(**values)` take it through JSON.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from trainyard.parent import LAUNCHER

_READ_S = 10  # to read a rank's last output; a process that left its session may hold the pipe open

OnLine = Callable[[int, str, bool], None]
"""Called with a rank, a line without its end, and True if the rank wrote it to stderr."""
OnEnd = Callable[[int, int], None]
"""Called with a rank and its exit code, or minus the signal that killed it."""


@dataclass(frozen=True)
class Share:
    """The ranks that one host starts, and the meeting point of all ranks."""

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
    """Further variables for the environment of every rank."""

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
        texts = {name: str(value) for name, value in place.items()}
        # The output is a pipe, even if a notebook has forced colours.
        usual = {"PYTHONUNBUFFERED": "1", "FORCE_COLOR": ""}
        if self.count > 1:  # like torchrun: otherwise each of several ranks takes all cores
            usual["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return {**usual, **self.variables, **texts}


def shares_of(
    command: Sequence[str],
    counts: Mapping[str, int],
    *,
    address: str,
    port: int,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Share]:
    """The share of each host. `counts`: ranks by host; ranks are numbered host by host."""
    size, first = sum(counts.values()), 0
    variables = {**(variables or {}), "TRAINYARD_HOSTS": ",".join(counts)}
    shares = {}
    for node, (host, count) in enumerate(counts.items()):
        shares[host] = Share(
            command, first, count, size, node, len(counts), address, port, variables
        )
        first += count
    return shares


class Ranks:
    """The processes of a share, each in a session of its own.

    They save and end if this process is killed or the thread that made this object ends, so that
    thread must outlive them. `on_line` and `on_end` are called from other threads: for each rank
    its lines in order, then its end, after its whole session has ended.
    """

    def __init__(self, share: Share, *, on_line: OnLine, on_end: OnEnd) -> None:
        """OSError if the command cannot be started; ranks already started are killed."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # held to signal a process, and to record its end
        try:
            for local_rank in range(share.count):
                self._processes[share.first + local_rank] = _start(share, local_rank)
        except OSError:
            for process in self._processes.values():
                _end_session(process)
                _close(process)
            raise
        for rank, process in self._processes.items():
            thread = threading.Thread(target=self._follow, args=(rank, process, on_line, on_end))
            thread.start()
            self._threads.append(thread)

    @property
    def running(self) -> bool:
        """True while a rank runs or one of its events is still to be delivered."""
        return any(thread.is_alive() for thread in self._threads)

    def signal(self, number: int) -> None:
        """Send a signal to each rank that runs."""
        with self._lock:
            for process in self._processes.values():
                if process.returncode is None:
                    os.kill(process.pid, number)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of all ranks and events. True if they ended within `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if deadline is None else max(deadline - time.monotonic(), 0))
        return not self.running

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL to ranks that are left after `grace_s`. Waits for all."""
        self.signal(signal.SIGTERM)
        if not self.wait(grace_s):
            self.kill()
            self.wait()

    def kill(self) -> None:
        """Send SIGKILL without waiting."""
        self.signal(signal.SIGKILL)

    def _follow(
        self, rank: int, process: "subprocess.Popen[bytes]", on_line: OnLine, on_end: OnEnd
    ) -> None:
        def read(stream: IO[bytes], is_error: bool) -> None:
            with stream:
                for line in stream:
                    on_line(rank, line.decode(errors="replace").rstrip("\r\n"), is_error)

        assert process.stdout and process.stderr
        streams = ((process.stdout, False), (process.stderr, True))
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        # WNOWAIT does not reap the process, so its pid is not reused.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _end_session(process)
        for reader in readers:
            reader.join(_READ_S)
        on_end(rank, process.returncode)


def _start(share: Share, local_rank: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        share.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | share.environment(local_rank) | {LAUNCHER: str(os.getpid())},
        start_new_session=True,
    )


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _close(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdout, process.stderr):
        assert stream
        stream.close()
