"""Before training: is every rank there, and does each run the same thing?

The check uses torch's key-value store. Rank 0 posts the number of this start and its facts (world
size, versions, recipe). Every other rank posts its process and the facts in which it differs. Once
all are there, or the time is over, rank 0 answers each of them.

A store may outlive a start: torchrun's agent keeps it through restarts. Keys therefore carry the
number of the start, and an answer carries a number that its rank drew.
"""

import json
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.distributed.interfaces import is_own, local_address, outward
from trainyard.distributed.launcher_variables import MeetingPoint, hosts_of_ranks
from trainyard.distributed.process_info import NAMED, ProcessInfo, rank_name
from trainyard.errors import InputError, PeerError, TrainyardError
from trainyard.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

_NOTICE_S = 10  # before the first message about missing ranks
_REPEAT_S = 60  # between later ones
_POLL_S = 0.2
_OTHERS_S = 3  # for other ranks to arrive after one that differs
_GRACE_S = 15  # for the answer of rank 0, after its time limit
_READ_S = 3  # for the other ranks to read that there is a problem
_HERE = "127.0.0.1"

Facts = Mapping[str, str]
Answer = dict[str, Any]
"""problem, "" if there is none; exit_code; address, that of rank 0 as other hosts reach it."""


class Start(NamedTuple):
    """All ranks are there and run the same thing."""

    number: str
    """Unique to this start."""
    address: str
    """Rank 0's address, as other hosts reach it."""
    processes: list[ProcessInfo]
    """The processes, by rank."""


class _Arrival(NamedTuple):
    process: ProcessInfo
    address: str
    """The rank's own address on its way to rank 0."""
    token: str
    differs: list[str]
    """The facts in which it differs from rank 0, in words."""


@dataclass(frozen=True)
class _Check:
    """One rank's part in the check."""

    store: "Store"
    world: World
    facts: Facts
    point: MeetingPoint
    limit_s: float
    me: ProcessInfo


def check_start(
    store: "Store", world: World, facts: Facts, *, point: MeetingPoint, limit_s: float
) -> Start:
    """Wait for all ranks. An error is raised on every rank that is there.

    PeerError if a rank does not come within `limit_s` or has ended; InputError if facts differ.
    """
    facts = {"number of ranks": f"{world.size}", **facts}
    check = _Check(store, world, facts, point, limit_s, ProcessInfo.current())
    start, answer = _FirstRank(check).run() if world.is_first else _attend(check)
    if answer["problem"]:
        is_input = answer["exit_code"] == InputError.exit_code
        error: TrainyardError = (InputError if is_input else PeerError)(answer["problem"])
        error.is_shared = True
        raise error
    return start


# --- another rank ---


def _attend(check: _Check) -> tuple[Start, Answer]:
    deadline = time.monotonic() + check.limit_s
    answer = first = None
    left = ""  # the start in which another process had this rank
    try:
        while answer is None:
            number, first = _announced(check, deadline, left)
            token = _arrive(check, number, first)
            if token is not None:
                answer = _answer(check, number, first, f"{number}/answer/{token}")
            elif left:
                raise _taken(check, number)
            else:
                left = number
                check.store.set(f"{number}/again", "")
        processes = [] if answer["problem"] else _load(check.store, f"{number}/processes")
    except RuntimeError as error:
        name = "rank 0" if first is None else rank_name(0, first)
        raise PeerError(f"{name} is gone; see its output") from error
    return Start(number, answer["address"], [ProcessInfo(*each) for each in processes]), answer


def _announced(check: _Check, deadline: float, left: str) -> tuple[str, ProcessInfo]:
    """The number of the start that rank 0 has announced, and its process.

    A start that is over was an earlier one: it has an answer, or its process has ended. `left`: a
    start that rank 0 is to announce again.
    """
    over = ""
    while time.monotonic() < deadline:
        if check.store.check(["start"]):
            number, process = _load(check.store, "start")
            first = ProcessInfo(*process)
            is_over = check.store.check([f"{number}/processes"])
            over = f"; {rank_name(0, first)} has started a run there" * is_over
            has_ended = first.is_visible_from(check.me) and first.has_ended()
            if not (is_over or has_ended or number == left):
                return number, first
        time.sleep(_POLL_S)
    raise PeerError(
        f"rank 0 did not come within {check.limit_s:.0f} s (says rank {check.world.rank} on "
        f"{check.me}): see its output, or its launcher's{over}"
    )


def _arrive(check: _Check, number: str, first: ProcessInfo) -> str | None:
    """Post this rank's arrival. Returns the token that the answer to it carries.

    None if another process has arrived as this rank: one that is alive, or one whose host was lost
    before the start and that this process replaces.
    """
    store, me, rank = check.store, check.me, check.world.rank
    if store.add(f"{number}/arrivals/{rank}", 1) > 1:
        return None
    address = _own_address(check.point.host or first.host)
    differs = _differences(_load(store, f"{number}/facts"), check.facts)
    arrival = _Arrival(me, address, secrets.token_hex(16), differs)
    store.set(f"{number}/arrival/{rank}", json.dumps(arrival))
    return arrival.token


def _taken(check: _Check, number: str) -> InputError:
    rank = check.world.rank
    other = ProcessInfo(*_load(check.store, f"{number}/arrival/{rank}")[0])
    return InputError(
        f"{rank_name(rank, other)} has joined already, so {check.me} cannot be rank {rank}: do two "
        "runs share a MASTER_PORT?"
    )


def _own_address(host: str) -> str:
    """This host's on the way to another one; loopback if the name of that one is not known."""
    try:
        return local_address(host)
    except OSError:
        return _HERE


def _answer(check: _Check, number: str, first: ProcessInfo, key: str) -> Answer | None:
    """Rank 0's answer. None if it has announced another start meanwhile."""
    is_visible = first.is_visible_from(check.me)
    deadline = time.monotonic() + check.limit_s + _GRACE_S
    while not check.store.check([key]):
        if _load(check.store, "start")[0] != number:
            return None
        if is_visible and first.has_ended():
            raise PeerError(f"{rank_name(0, first)} is gone; see its output")
        if time.monotonic() > deadline:
            raise PeerError(f"{rank_name(0, first)} does not answer")
        time.sleep(_POLL_S)
    answer: Answer = _load(check.store, key)
    check.store.set(f"{key}/read", "")
    return answer


def _differences(first: Facts, mine: Facts) -> list[str]:
    keys = [*first, *(key for key in mine if key not in first)]
    return [
        f"{key} is {mine.get(key, 'not set')}, not {first.get(key, 'not set')}"
        for key in keys
        if mine.get(key) != first.get(key)
    ]


def _load(store: "Store", key: str) -> Any:
    """The value of a key that is there, or is about to be."""
    return json.loads(store.get(key))


# --- rank 0 ---


class _FirstRank:
    """Waits for the others and answers them."""

    def __init__(self, check: _Check) -> None:
        self._store, self._world, self._point = check.store, check.world, check.point
        self._limit_s, self._facts, self._me = check.limit_s, check.facts, check.me
        self._announce()

    def _announce(self) -> None:
        """Begin a start, to which all other ranks are to come."""
        self._number = secrets.token_hex(16)
        self._arrivals: dict[int, _Arrival] = {}
        self._missing = set(range(1, self._world.size))
        self._store.set(f"{self._number}/facts", json.dumps(dict(self._facts)))
        self._store.set("start", json.dumps([self._number, self._me]))

    def run(self) -> tuple[Start, Answer]:
        problem, exit_code = self._wait()
        addresses = [arrival.address for arrival in self._arrivals.values()]
        address = local_address(outward(addresses)) if addresses else _HERE
        processes = [self._me, *(self._arrivals[rank].process for rank in sorted(self._arrivals))]
        self._store.set(f"{self._number}/processes", json.dumps(processes))
        answer: Answer = {"problem": problem, "exit_code": exit_code, "address": address}
        keys = [f"{self._number}/answer/{arrival.token}" for arrival in self._arrivals.values()]
        for key in keys:
            self._store.set(key, json.dumps(answer))
        if problem:
            self._wait_for_readers(keys)
        return Start(self._number, address, processes), answer

    def _wait(self) -> tuple[str, int]:
        """The problem, "" if there is none, and its exit code."""
        started = time.monotonic()
        deadline, notice = started + self._limit_s, started + _NOTICE_S
        while self._missing and (now := time.monotonic()) < deadline:
            if self._store.check([f"{self._number}/again"]):
                self._announce()
            self._look()
            if ended := [rank for rank in self._arrivals if self._has_ended(rank)]:
                names = _listed(self._name(rank) for rank in ended)
                problem = f"{names} ended while others were still to come; see its output"
                return problem, PeerError.exit_code
            if self._differing():
                deadline = min(deadline, now + _OTHERS_S)
            if now > notice:
                notice += _REPEAT_S
                _say(f"waiting for {self._absent()} ({now - started:.0f} of {self._limit_s:.0f} s)")
            if self._missing:
                time.sleep(_POLL_S)
        if self._differing():
            return self._disagreement(), InputError.exit_code
        return (self._absence(), PeerError.exit_code) if self._missing else ("", 0)

    def _wait_for_readers(self, keys: list[str]) -> None:
        """The store goes with this process."""
        deadline = time.monotonic() + _READ_S
        while not self._store.check([f"{key}/read" for key in keys]):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _look(self) -> None:
        """Take the ranks that have arrived."""
        for rank in sorted(self._missing):
            key = f"{self._number}/arrival/{rank}"
            if self._store.check([key]):
                process, *rest = _load(self._store, key)
                self._arrivals[rank] = _Arrival(ProcessInfo(*process), *rest)
        self._missing -= self._arrivals.keys()

    def _has_ended(self, rank: int) -> bool:
        process = self._arrivals[rank].process
        return process.is_visible_from(self._me) and process.has_ended()

    def _name(self, rank: int) -> str:
        return rank_name(rank, self._arrivals[rank].process)

    def _differing(self) -> list[int]:
        return [rank for rank, arrival in self._arrivals.items() if arrival.differs]

    def _disagreement(self) -> str:
        rank, *others = self._differing()
        more = f" ({len(others)} more {'rank differs' if len(others) == 1 else 'ranks differ'})"
        return (
            f"{self._name(rank)} does not run what rank 0 ({self._me}) runs: "
            f"{'; '.join(self._arrivals[rank].differs[:NAMED])}{more * bool(others)}"
        )

    def _absent(self) -> str:
        return named(sorted(self._missing), hosts_of_ranks(self._world))

    def _absence(self) -> str:
        there = (self._me, *(arrival.process for arrival in self._arrivals.values()))
        hosts = _listed(sorted({process.host for process in there}))
        elsewhere = self._point.file is None and not is_own(self._point.host)
        return (
            f"{self._absent()} of {self._world.size} did not come within {self._limit_s:.0f} s; "
            f"there are ranks from {hosts}. Either they were not started or failed before (see "
            f"their output), or they cannot reach {self._point} (a wrong interface, a closed port)"
            + f"; {self._point.host} is not this host of rank 0"
            * elsewhere
        )


def named(ranks: list[int], hosts: Mapping[int, str]) -> str:
    """rank 3 on b; ranks 1, 2 and 9 more."""
    words = [f"{rank} on {hosts[rank]}" if rank in hosts else f"{rank}" for rank in ranks]
    return f"rank{'s' * (len(ranks) > 1)} {_listed(words)}"


def _listed(words: Iterable[str]) -> str:
    words = list(words)
    more = len(words) - NAMED
    return ", ".join(words[:NAMED]) + f" and {more} more" * (more > 0)


def _say(message: str) -> None:
    sys.stderr.write(f"trainyard: {message}\n")
