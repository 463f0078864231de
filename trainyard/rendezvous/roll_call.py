"""Before anything else: is every rank there, and does each run the same thing?

By torch's key-value store, whose server is the first rank's or a launcher's agent's, the first rank
posts where it lets the others in, and its facts. Each other comes in over a line of its own, says
in what its facts differ, and waits for a verdict, the same for all. Since the lines stay open, one
that ends meanwhile is missed at once; one that does not come, after a stated time. What an earlier
start has left in the store leads nowhere, and is tried until the first rank of this one has posted.
The work is linear in the number of ranks.
"""

import json
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.errors import InputError, PeerError, TrainyardError
from trainyard.rendezvous.discovery import MeetingPoint, hosts_of_ranks
from trainyard.rendezvous.entrance import Entrance
from trainyard.rendezvous.interfaces import is_own, outward, own_hosts, server
from trainyard.rendezvous.lines import Line
from trainyard.rendezvous.place import Place
from trainyard.rendezvous.store import cause_of
from trainyard.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

_NOTICE_S = 10  # after so long, those who wait hear for whom
_REPEAT_S = 60
_LOOK_S = 0.5
_OTHERS_S = 3  # for others to come once a rank differs: to say how many do
_GRACE_S = 15  # for a verdict to come, after its time
_CONNECT_S = 5
_WELCOME_S = 20  # from the first rank, which has thousands to welcome
_RETRY_S = 0.2
_NAMED = 8  # ranks that a message names; more are counted

Facts = Mapping[str, str]


class Roll(NamedTuple):
    """All ranks are in."""

    lines: list[Line]
    """The first rank's to all others, or another rank's to the first one."""
    address: str
    """The first rank's, as other hosts reach it."""
    number: str
    """Of this start: no other has it."""


class Verdict(NamedTuple):
    problem: str | None
    exit_code: int
    address: str = ""


def call_roll(
    store: "Store", world: World, facts: Facts, *, point: MeetingPoint, limit_s: float
) -> Roll:
    """Returns once every rank is there with the same facts; else raises on all of them.

    PeerError if a rank has not come within `limit_s`, or has ended; InputError if some differ.
    """
    facts = {"number of ranks": f"{world.size}", **facts}
    if world.is_first:
        return _hold(store, world, facts, point=point, limit_s=limit_s)
    return _attend(store, world, facts, limit_s=limit_s)


def _check(verdict: Verdict) -> None:
    if verdict.problem is not None:
        is_input = verdict.exit_code == InputError.exit_code
        error: TrainyardError = (InputError if is_input else PeerError)(verdict.problem)
        error.is_shared = True
        raise error


# --- another rank ---


def _attend(store: "Store", world: World, facts: Facts, *, limit_s: float) -> Roll:
    line, number = _enter(store, world, facts, time.monotonic() + limit_s)
    try:
        said = line.wait(limit_s + _GRACE_S)
        if said is None:
            raise PeerError(f"{line} is gone; its own output says why")
        verdict = Verdict(*said)
        _check(verdict)
    except TimeoutError:
        line.close()
        raise PeerError(f"{line} says nothing for {limit_s + _GRACE_S:.0f} s") from None
    except TrainyardError:
        line.close()
        raise
    return Roll([line], verdict.address, number)


def _enter(store: "Store", world: World, facts: Facts, deadline: float) -> tuple[Line, str]:
    """A line to the first rank, which has let this one in, and the number of its start."""
    begun = time.monotonic()
    while True:
        first = _first(store, world, begun, deadline)
        trouble = ""
        for host in first["hosts"]:
            try:
                return _line_to(first, host, world, facts), first["number"]
            except OSError as error:
                trouble += f"; at {host}:{first['port']} {cause_of(error)}"
        if trouble:  # which may pass, as one who posted for an earlier start does
            store.set(_trouble(first["number"], world.rank), trouble)
        if time.monotonic() > deadline:
            raise PeerError(
                f"rank {world.rank} ({Place.mine()}) does not get through to rank 0 "
                f"({Place(*first['place'])}){trouble}: every port between the hosts must be open"
            )
        time.sleep(_RETRY_S)


def _first(store: "Store", world: World, begun: float, deadline: float) -> Any:
    """What the first rank has posted."""
    try:
        store.wait(["first"], timedelta(seconds=max(deadline - time.monotonic(), _RETRY_S)))
        return json.loads(store.get("first"))
    except RuntimeError as error:
        if "timeout" in str(error).lower():
            raise PeerError(
                f"rank 0 did not come within {deadline - begun:.0f} s (says rank {world.rank} on "
                f"{Place.mine()}): its own output, or its launcher's, says why"
            ) from None
        raise PeerError("rank 0 is gone; its own output says why") from error


def _line_to(first: Any, host: str, world: World, facts: Facts) -> Line:
    line = Line(socket.create_connection((host, first["port"]), _CONNECT_S), 0)
    try:
        line.place = Place(*first["place"])
        differs = _differences(first["facts"], facts)
        hello = {"number": first["number"], "rank": world.rank, "place": Place.mine()}
        line.send(hello | {"differs": differs})
        answer = line.wait(_WELCOME_S)
    except (OSError, ValueError):
        answer = None
    if answer and "refused" in answer:
        line.close()
        raise InputError(
            f"{answer['refused']}, so {Place.mine()} cannot be rank {world.rank}: do two runs meet "
            "at one MASTER_PORT?"
        )
    if answer is None:
        line.close()
        raise OSError("what answers is not rank 0")
    return line


def _differences(first: Facts, mine: Facts) -> list[str]:
    keys = [*first, *(key for key in mine if key not in first)]
    return [
        f"{key} is {mine.get(key, 'not set')}, not {first.get(key, 'not set')}"
        for key in keys
        if mine.get(key) != first.get(key)
    ]


def _trouble(number: str, rank: int) -> str:
    return f"trouble/{number}/{rank}"


# --- the first rank ---


def _hold(
    store: "Store", world: World, facts: Facts, *, point: MeetingPoint, limit_s: float
) -> Roll:
    for_others = world.num_nodes > 1
    by_file = socket.gethostname() if for_others else "127.0.0.1"
    host = point.host if point.file is None else by_file
    with closing(Entrance(server(host, 0, for_others=for_others), world.size)) as entrance:
        posted = {"hosts": own_hosts(host), "port": entrance.port, "number": entrance.number}
        store.set("first", json.dumps(posted | {"place": Place.mine(), "facts": dict(facts)}))
        verdict = _judge(entrance, _Absence(store, world, point, entrance), limit_s)
    lines = list(entrance.lines.values())
    if verdict.problem is None:
        verdict = verdict._replace(address=outward(line.own_address for line in lines))
    for line in lines:
        line.send(verdict)
    try:
        _check(verdict)
    except TrainyardError:
        for line in lines:
            line.close()
        raise
    return Roll(lines, verdict.address, entrance.number)


def _judge(entrance: Entrance, absence: "_Absence", limit_s: float) -> Verdict:
    """Once all are there, one has ended, or the time is over."""
    started = time.monotonic()
    deadline, notice = started + limit_s, started + _NOTICE_S
    while entrance.missing and not entrance.gone and (now := time.monotonic()) < deadline:
        entrance.look(min(_LOOK_S, deadline - now))
        if entrance.differences:
            deadline = min(deadline, now + _OTHERS_S)
        if now > notice:
            notice += _REPEAT_S
            _say(f"waiting for {absence} ({now - started:.0f} of {limit_s:.0f} s)")
    if entrance.differences:
        return _disagreement(entrance)
    if entrance.gone:
        gone = _listed(map(str, entrance.gone))
        problem = f"{gone} ended while others were still to come; its own output says why"
        return Verdict(problem, PeerError.exit_code)
    if entrance.missing:
        return absence.verdict(limit_s)
    return Verdict(None, 0)


class _Absence(NamedTuple):
    """Who has not come, and why."""

    store: "Store"
    world: World
    point: MeetingPoint
    entrance: Entrance

    def __str__(self) -> str:
        return named(sorted(self.entrance.missing), hosts_of_ranks(self.world)) + self._trouble()

    def _trouble(self) -> str:
        """Of the first ones of those who have tried."""
        for rank in sorted(self.entrance.missing)[:_NAMED]:
            key = _trouble(self.entrance.number, rank)
            if self.store.check([key]):
                return f" (rank {rank} does not get through{self.store.get(key).decode()})"
        return ""

    def verdict(self, limit_s: float) -> Verdict:
        places = (Place.mine(), *(line.place for line in self.entrance.lines.values()))
        present = _listed(sorted({place.host for place in places}))
        elsewhere = self.point.file is None and not is_own(self.point.host)
        return Verdict(
            f"{self} of {self.world.size} did not come within {limit_s:.0f} s; there are ranks "
            f"from {present}. Either they were not started or failed before (see their output), or "
            f"they cannot reach {self.point} (a wrong interface, a closed port)"
            + f"; {self.point.host} is not this host of rank 0"
            * elsewhere,
            PeerError.exit_code,
        )


def _disagreement(entrance: Entrance) -> Verdict:
    rank, differs = next(iter(entrance.differences.items()))
    others = len(entrance.differences) - 1
    return Verdict(
        f"{entrance.lines[rank]} does not run what rank 0 ({Place.mine()}) runs: "
        f"{'; '.join(differs[:_NAMED])}"
        + (f" ({others} more {'rank differs' if others == 1 else 'ranks differ'})" * bool(others)),
        InputError.exit_code,
    )


def named(ranks: list[int], hosts: Mapping[int, str]) -> str:
    """rank 3 on b; ranks 1, 2 and 9 more."""
    words = [f"{rank} on {hosts[rank]}" if rank in hosts else f"{rank}" for rank in ranks]
    return f"rank{'s' * (len(ranks) > 1)} {_listed(words)}"


def _listed(words: Iterable[str]) -> str:
    words = list(words)
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + f" and {more} more" * (more > 0)


def _say(message: str) -> None:
    sys.stderr.write(f"trainyard: {message}\n")
