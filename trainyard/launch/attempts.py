"""Supervision of all ranks of a run on several hosts, shared by the ssh and Ray launchers.

A launcher supplies a `Cluster`: its hosts, their meeting point, and a way to get a lost host back.
Hosts report through `events.put`, from any thread: `Line`, `End`, `Gone` (see events.py). A cluster
that waits takes events from the same queue (see answers.py).

    events = Events()
    with passing_signals(events):                       # in the main thread
        cluster = ...                                   # its hosts put events
        return supervise(cluster, events, Policy(restarts=3), show=printer.line, say=say)

An attempt is one start of all ranks, until the last has ended. If a rank fails or a host is lost,
the other ranks have NOTICE_S to notice by themselves, then get SIGTERM, time to save, and SIGKILL.
"""

import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from trainyard.errors import Stopped, TrainyardError
from trainyard.launch.ends import (
    GRACE_S,
    NOTICE_S,
    SHARED_ENDS,
    described,
    first_cause,
    is_last,
    shell_code,
)
from trainyard.launch.events import End, Event, Events, Gone, Line, Signal, stopped_by
from trainyard.launch.ranks import Share

_KILL_S = 10  # seconds until a killed process must be gone
_PASSED_ON = ("GLOO_", "NCCL_", "OMP_", "TORCH_", "TRAINYARD_")


class Host(Protocol):
    """One machine. Its methods neither block nor fail if the machine is gone."""

    def start(self, share: Share) -> None: ...

    def signal(self, number: int) -> None:
        """Send a signal to every running rank there."""


class HostsGone(TrainyardError):
    """Hosts are lost: the reason by name."""

    def __init__(self, gone: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"host {name} is gone: {why}" for name, why in gone.items()))
        self.gone = dict(gone)


class Cluster(Protocol):
    """The hosts of a run."""

    @property
    def hosts(self) -> Mapping[str, Host]:
        """By name, in the order of ranks."""

    def shares(self) -> dict[str, Share]:
        """The share of each host, with a new meeting point. HostsGone if a host does not answer.

        Called before each attempt.
        """

    def leave_out(self, gone: Mapping[str, str]) -> None:
        """Continue without these hosts."""

    def bring_back(self, gone: Mapping[str, str]) -> None:
        """Get these hosts back. Raises HostsGone, or another error, if that fails."""


@dataclass(frozen=True)
class Policy:
    """Limits of restarts."""

    restarts: int = 0
    """Restarts allowed after failures. Excluded hosts and requeues do not count."""
    min_hosts: int | None = None
    """Continue at once without lost hosts, as long as this many are left."""


@dataclass(frozen=True)
class Ending:
    """Result of an attempt."""

    code: int
    cause: str = ""
    gone: Mapping[str, str] = field(default_factory=dict)
    """Lost hosts, with the reason."""

    @property
    def is_last(self) -> bool:
        return not self.gone and is_last(self.code)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment variables that ranks on other hosts get too."""
    return {name: text for name, text in environment.items() if name.startswith(_PASSED_ON)}


def supervise(
    cluster: Cluster,
    events: Events,
    policy: Policy,
    *,
    show: Callable[[str, Line], None],
    say: Callable[[str], None],
) -> int:
    """Start all ranks, and restart after failures as the policy allows. Returns the exit code.

    `show` receives each line of a rank with its host. `say` receives messages about lost hosts and
    restarts, as they happen.
    TrainyardError, with the first cause, if a rank was killed or a host is lost for good.
    """
    restarts = 0
    while True:
        try:
            shares = cluster.shares()
            ending = Attempt(cluster.hosts, shares, events, show=show, say=say).run()
        except HostsGone as error:
            say(str(error))
            ending = Ending(1, str(error), error.gone)
        if ending.is_last:
            return ending.code
        left = [name for name in cluster.hosts if name not in ending.gone]
        if ending.gone and policy.min_hosts is not None and len(left) >= policy.min_hosts:
            cluster.leave_out(ending.gone)
            say(f"going on with {', '.join(left)}")
            continue
        if restarts == policy.restarts:
            return _give_up(ending)
        restarts += 1
        known = "" if ending.gone else f"{ending.cause}: "
        say(f"{known}starting again ({restarts} of {policy.restarts})")
        if ending.gone:
            cluster.bring_back(ending.gone)


def _give_up(ending: Ending) -> int:
    """Returns the code of ranks that ended by themselves, as they have logged why; else raises."""
    if ending.code > 0 and not ending.gone:
        return ending.code
    error = TrainyardError("giving up: no restarts are left" if ending.gone else ending.cause)
    error.exit_code = shell_code(ending.code)
    raise error


class Attempt:
    """One start of all ranks."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        shares: Mapping[str, Share],
        events: Events,
        *,
        show: Callable[[str, Line], None],
        say: Callable[[str], None],
    ) -> None:
        self._hosts, self._shares, self._events = hosts, shares, events
        self._show, self._say = show, say
        self._host_of = {
            share.first + local_rank: host
            for host, share in shares.items()
            for local_rank in range(share.count)
        }
        self._ends: dict[int, int] = {}
        self._gone: dict[str, str] = {}
        self._wanted: int | None = None  # the last signal that this process received
        self._urging: Iterator[float] = iter(())
        self._next_urge: float | None = None

    def run(self) -> Ending:
        for name, share in self._shares.items():
            self._hosts[name].start(share)
        while self._running():
            event = self._next_event()
            if event is not None:
                self._take(event)
        codes = self._ends.values()
        if self._wanted is None and (min(codes, default=0) < 0 or Stopped.exit_code in codes):
            self._await_gone()
        return self._ending()

    def _running(self) -> list[int]:
        return [
            rank
            for rank, host in self._host_of.items()
            if rank not in self._ends and host not in self._gone
        ]

    def _next_event(self) -> Event | None:
        """The next event, or None when the next step of `_urges` is due."""
        left = None if self._next_urge is None else self._next_urge - time.monotonic()
        try:
            return self._events.get(timeout=left if left is None else max(left, 0))
        except queue.Empty:
            self._urge()
            return None

    def _take(self, event: Event) -> None:
        match event:
            case Line():
                self._pass_on(event)
            case End(rank=rank, code=code):
                self._ends[rank] = code
                if code:
                    self._expect_end(quietly=code in SHARED_ENDS)
            case Gone(host=host, why=why) if host in self._shares:
                self._gone[host] = why
                self._say(str(HostsGone({host: why})))
                self._expect_end()
            case Signal(number=number):
                self._wanted = number
                self._tell(signal.SIGTERM if number == signal.SIGHUP else number)
                self._expect_end(quietly=True)

    def _pass_on(self, line: Line) -> None:
        try:
            self._show(self._host_of[line.rank], line)
        except OSError:  # the reader of stdout is gone (`| head`): like a closed terminal
            self._events.put(Signal(signal.SIGHUP))

    def _await_gone(self) -> None:
        """Wait for `Gone`: a rank that was killed or stopped may be on a host that goes down."""
        deadline = time.monotonic() + NOTICE_S
        while (left := deadline - time.monotonic()) > 0 and not self._gone:
            with suppress(queue.Empty):
                self._take(self._events.get(timeout=left))

    def _expect_end(self, *, quietly: bool = False) -> None:
        """Start the countdown for the remaining ranks; `quietly`: they know and get no SIGTERM."""
        if self._next_urge is None:
            self._urging = self._urges(quietly=quietly)
            self._urge()

    def _urge(self) -> None:
        wait_s = next(self._urging, None)
        self._next_urge = None if wait_s is None else time.monotonic() + wait_s

    def _urges(self, *, quietly: bool) -> Iterator[float]:
        """Yields seconds to wait; the code after each yield acts once they are over."""
        if not quietly:
            yield NOTICE_S
            self._tell(signal.SIGTERM)
        yield GRACE_S
        self._tell(signal.SIGKILL)
        yield _KILL_S
        for rank in self._running():
            self._gone[self._host_of[rank]] = f"rank {rank} cannot be killed"

    def _tell(self, number: int) -> None:
        for name in {self._host_of[rank] for rank in self._running()}:
            self._hosts[name].signal(number)

    def _ending(self) -> Ending:
        codes = set(self._ends.values())
        if self._wanted is not None and (codes != {0} or self._gone):
            return Ending(stopped_by(self._wanted).exit_code)
        if self._gone:
            return Ending(1, str(HostsGone(self._gone)), self._gone)
        rank, code = first_cause(self._ends)
        return Ending(code, f"host {self._host_of[rank]}: {described(rank, code)}")
