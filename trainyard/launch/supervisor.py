"""Supervision of all ranks of a run: attempts, and restarts after failures.

An attempt is one start of all ranks, until the last has ended. If a rank fails or a host is lost,
the other ranks have NOTICE_S to notice by themselves, then get SIGTERM, time to save, and SIGKILL.

The launchers for ssh and Ray supply a `Cluster`. Its hosts report by `events.put`, from any thread.

    events = Events()
    with passing_signals(events):                       # in the main thread
        cluster = ...
        return supervise(cluster, events, Policy(restarts=3), show=printer.line, say=say)
"""

import math
import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from trainyard.errors import Requeued, Stopped, TrainyardError
from trainyard.launch.events import Event, Events, Gone, Signal
from trainyard.launch.exit_codes import (
    GRACE_S,
    NOTICE_S,
    code_after,
    describe,
    first_cause,
    is_final,
    meaning_of,
)
from trainyard.launch.job import Say
from trainyard.launch.ranks import End, Line, Share
from trainyard.launch.signals import next_event

_KILL_S = 10  # seconds until a killed process must be gone
_SHARED_CODES = (0, Stopped.exit_code, Requeued.exit_code)  # of all ranks, or of none


class Host(Protocol):
    """One machine. Its methods neither block nor fail if the machine is gone."""

    def start(self, share: Share) -> None: ...

    def signal(self, number: int) -> None:
        """Send a signal to every running rank there."""


class Cluster(Protocol):
    """The hosts of a run."""

    @property
    def hosts(self) -> Mapping[str, Host]:
        """The hosts by name, in the order of ranks."""

    def shares(self) -> dict[str, Share]:
        """The share of each host in the next attempt. HostsGone if a host does not answer."""

    def leave_out(self, gone: Mapping[str, str]) -> None:
        """Continue without these hosts."""

    def bring_back(self, gone: Mapping[str, str]) -> None:
        """Get these hosts back. Raises HostsGone, or another error, if that fails."""


class HostsGone(TrainyardError):
    """Hosts are lost: the reason by name."""

    def __init__(self, gone: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"host {name} is gone: {why}" for name, why in gone.items()))
        self.gone = dict(gone)


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
    """A message, unless the user has been told already."""
    gone: Mapping[str, str] = field(default_factory=dict)
    """Lost hosts, with the reason."""


def with_restarts(attempt: Callable[[], Ending], restarts: int, say: Say) -> int:
    """Make attempts until one is final, with at most so many restarts. Returns the exit code.

    TrainyardError, with the cause, if a rank was killed or a host is lost in the last attempt.
    """
    for restart in count(1):
        ending = attempt()
        if restart > restarts or (is_final(ending.code) and not ending.gone):
            break
        cause = f"{ending.cause}: " if ending.cause else ""
        say(f"{cause}starting again ({restart} of {restarts})")
    if ending.code >= 0 and not ending.gone:
        return ending.code  # the ranks have logged why
    error = TrainyardError(ending.cause or "giving up: no restarts are left")
    error.exit_code = meaning_of(ending.code)
    raise error


def supervise(
    cluster: Cluster,
    events: Events,
    policy: Policy,
    *,
    show: Callable[[str, Line], None],
    say: Say,
) -> int:
    """Start all ranks, and restart after failures as the policy allows. Returns the exit code.

    `show` receives each line of a rank with its host. `say` receives messages about lost hosts and
    restarts, as they happen. Errors: see `with_restarts`.
    """
    gone: Mapping[str, str] = {}

    def attempt() -> Ending:
        nonlocal gone
        if gone:
            cluster.bring_back(gone)
        while True:
            ending = _attempted(cluster, events, show=show, say=say)
            gone = ending.gone
            left = [name for name in cluster.hosts if name not in gone]
            if not gone or policy.min_hosts is None or len(left) < policy.min_hosts:
                return ending
            cluster.leave_out(gone)
            say(f"going on with {', '.join(left)}")

    return with_restarts(attempt, policy.restarts, say)


def _attempted(
    cluster: Cluster, events: Events, *, show: Callable[[str, Line], None], say: Say
) -> Ending:
    try:
        shares = cluster.shares()
    except HostsGone as error:
        say(str(error))
        return Ending(1, gone=error.gone)
    attempt = Attempt(cluster.hosts, shares, events, show=show, say=say)
    attempt.run()
    attempt.await_gone()
    return attempt.ending()


class Attempt:
    """One start of all ranks."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        shares: Mapping[str, Share],
        events: Events,
        *,
        show: Callable[[str, Line], None],
        say: Say,
        grace_s: float = GRACE_S,
    ) -> None:
        self.codes: dict[int, int] = {}
        """Exit codes of the ranks that have ended."""
        self._hosts, self._shares, self._events = hosts, shares, events
        self._show, self._say, self._grace_s = show, say, grace_s
        self._host_of = {rank: host for host, share in shares.items() for rank in share.ranks}
        self._gone: dict[str, str] = {}
        self._signal: int | None = None  # the last one that this process received
        self._escalation: Iterator[float] | None = None
        self._escalate_at = math.inf

    def run(self) -> None:
        """Start all ranks and wait until the last has ended or its host is lost."""
        for name, share in self._shares.items():
            self._hosts[name].start(share)
        while self._running():
            left_s = max(self._escalate_at - time.monotonic(), 0)
            try:
                self._take(next_event(self._events, left_s))
            except queue.Empty:
                self._escalate()

    def await_gone(self) -> None:
        """Wait for `Gone`, since a rank may be killed or stopped because its host goes down."""
        is_likely = any(code < 0 or code == Stopped.exit_code for code in self.codes.values())
        deadline = time.monotonic() + NOTICE_S * (is_likely and self._signal is None)
        while (left_s := deadline - time.monotonic()) > 0 and not self._gone:
            with suppress(queue.Empty):
                self._take(self._events.get(timeout=left_s))

    def ending(self) -> Ending:
        if self._signal is not None and ({*self.codes.values()} != {0} or self._gone):
            return Ending(code_after(self._signal, self.codes))
        if self._gone:
            return Ending(1, gone=self._gone)
        rank, code = first_cause(self.codes)
        return Ending(code, f"host {self._host_of[rank]}: {describe(rank, code)}")

    def _running(self) -> list[int]:
        return [
            rank
            for rank, host in self._host_of.items()
            if rank not in self.codes and host not in self._gone
        ]

    def _take(self, event: Event) -> None:
        match event:
            case Line(rank=rank):
                self._show(self._host_of[rank], event)
            case End(rank=rank, code=code):
                self.codes[rank] = code
                if code:
                    self._expect_end(are_told=code in _SHARED_CODES)
            case Gone(host=host, why=why) if host in self._shares:
                self._gone[host] = why
                self._say(str(HostsGone({host: why})))
                self._expect_end()
            case Signal(number=number):
                self._signal = number
                self._tell(signal.SIGTERM if number == signal.SIGHUP else number)
                self._expect_end(are_told=True)

    def _expect_end(self, *, are_told: bool = False) -> None:
        """Start the countdown for the remaining ranks; those that `are_told` get no SIGTERM."""
        if self._escalation is None:
            self._escalation = self._escalating(are_told=are_told)
            self._escalate()

    def _escalate(self) -> None:
        wait_s = next(self._escalation, math.inf) if self._escalation else math.inf
        self._escalate_at = time.monotonic() + wait_s

    def _escalating(self, *, are_told: bool) -> Iterator[float]:
        """Yields seconds to wait; the code after each yield acts once they are over."""
        if not are_told:
            yield NOTICE_S
            self._tell(signal.SIGTERM)
        yield self._grace_s
        self._tell(signal.SIGKILL)
        yield _KILL_S
        for rank in self._running():
            self._gone[self._host_of[rank]] = f"rank {rank} cannot be killed"

    def _tell(self, number: int) -> None:
        for name in {self._host_of[rank] for rank in self._running()}:
            self._hosts[name].signal(number)
