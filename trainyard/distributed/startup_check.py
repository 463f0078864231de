"""Before training: is every rank there, and does each run the same thing?

The check uses torch's key-value store. Rank 0 posts its facts (world size, versions, recipe). Every
other rank posts its process, and the facts in which it differs. Once all are there, or the time is
over, rank 0 posts an answer for each. What rank 0 sends and is asked grows as the number of ranks.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from trainyard.distributed.interfaces import LOOPBACK, local_address, outward
from trainyard.distributed.launcher_variables import MeetingPoint
from trainyard.distributed.process_info import NAMED, ProcessInfo
from trainyard.errors import InputError, PeerError, TrainyardError
from trainyard.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

_NOTICE_S = 10  # before the first message about missing ranks
_REPEAT_S = 60  # between later ones
_POLL_S = 0.2
_PROBLEM_S = 3  # for further ranks to arrive once one differs, and for all to read the answer

Facts = Mapping[str, str]
_DIFFERS = "differs"
_KINDS = {kind.__name__: kind for kind in (InputError, PeerError)}


class Start(NamedTuple):
    """All ranks are there and run the same thing."""

    address: str
    """Rank 0's address, as other hosts reach it."""
    processes: dict[int, ProcessInfo]
    """By rank: of all ranks on rank 0; elsewhere of rank 0 and of the ranks on this host."""


class _Arrival(NamedTuple):
    process: ProcessInfo
    address: str
    """The rank's own address on its way to rank 0."""
    differs: list[str]
    """The facts in which it differs from rank 0, in words."""


def check_start(
    store: "Store", world: World, facts: Facts, *, point: MeetingPoint, limit_s: float
) -> Start:
    """Wait for all ranks. An error is raised on every rank that is there.

    `store`: for this start alone. PeerError if a rank does not come within `limit_s`; InputError if
    facts differ.
    """
    facts = {"number of ranks": f"{world.size}", **facts}
    place = 0
    if world.is_first:
        _answer(store, world, facts, point=point, limit_s=limit_s)
    else:
        place = _arrive(store, world, facts, point)
    problem, address, processes = json.loads(store.get(_answer_to(place)))
    start = Start(address, {rank: ProcessInfo(*process) for rank, process in processes})
    if problem:
        time.sleep(_PROBLEM_S * world.is_first)  # the store goes with this process
        kind, code, text, fields = problem
        error: TrainyardError = _KINDS[kind].unpacked(code, text, fields)
        error.is_shared = True
        raise error
    me, taken_by = ProcessInfo.current(), start.processes[place]
    if taken_by != me:
        raise InputError(
            "rank.taken",
            "rank {rank} ({other_host}, process {other_pid}) has joined, so {host}, process {pid} "
            "cannot be rank {rank}: do two runs share a MASTER_PORT?",
            rank=world.rank,
            other_host=taken_by.host,
            other_pid=taken_by.pid,
            host=me.host,
            pid=me.pid,
        )
    return start


def _arrive(store: "Store", world: World, facts: Facts, point: MeetingPoint) -> int:
    """Returns the rank whose answer is meant: 0 where the first rank's world has no such rank."""
    try:
        first = json.loads(store.get("facts"))
        differs = _differences(first, facts)
        arrival = _Arrival(ProcessInfo.current(), local_address(point.host), differs)
        place = world.rank if world.rank < int(first["number of ranks"]) else 0
        store.set(_arrival_of(world.rank), json.dumps(arrival))
        if differs and place:
            store.set(_DIFFERS, "")
        store.wait([_answer_to(place)])
    except RuntimeError as error:
        raise PeerError(
            "rank.first-rank-gone",
            "rank 0 at {address} is gone or does not answer; see its output",
            address=str(point),
        ) from error
    return place


def _differences(first: Facts, mine: Facts) -> list[str]:
    keys = [*first, *(key for key in mine if key not in first)]
    return [
        f"{key} is {mine.get(key, 'not set')}, not {first.get(key, 'not set')}"
        for key in keys
        if mine.get(key) != first.get(key)
    ]


# --- rank 0 ---


def _answer(
    store: "Store", world: World, facts: Facts, *, point: MeetingPoint, limit_s: float
) -> None:
    """Post what all ranks wait for."""
    me = ProcessInfo.current()
    store.set("facts", json.dumps(dict(facts)))
    missing = _await_others(store, world, limit_s)
    there = [rank for rank in range(1, world.size) if rank not in {*missing}]
    arrivals = dict(zip(there, map(_loaded, _values(store, there)), strict=True))
    problem: TrainyardError | None = _disagreement(me, arrivals)
    if missing and not problem:
        hosts = _listed(sorted({me.host, *(each.process.host for each in arrivals.values())}))
        problem = PeerError(
            "rank.absent",
            "{ranks} of {size} did not come within {limit_s:.0f} s; there are ranks from {hosts}. "
            "Either they were not started or failed before (see their output), or they cannot "
            "reach {address} (a wrong interface, a closed port)",
            ranks=_ranks(missing),
            size=world.size,
            limit_s=limit_s,
            hosts=hosts,
            address=str(point),
        )
    addresses = [arrival.address for arrival in arrivals.values()]
    address = local_address(outward([*addresses, LOOPBACK]))
    processes = {0: me} | {rank: arrival.process for rank, arrival in arrivals.items()}
    near: dict[tuple[str, str], list[int]] = {}
    for rank, process in processes.items():
        near.setdefault((process.host, process.namespaces), []).append(rank)
    answer = problem and (type(problem).__name__, *problem.packed())
    for rank in range(world.size):
        mine = processes.get(rank, me)
        known = {0, *near[mine.host, mine.namespaces]} if rank else processes
        content = answer, address, [(each, processes[each]) for each in known]
        store.set(_answer_to(rank), json.dumps(content))


def _await_others(store: "Store", world: World, limit_s: float) -> list[int]:
    """Until all are there, the time is over, or one differs. Returns the ranks that are absent."""
    started = time.monotonic()
    deadline, notice = started + limit_s, started + _NOTICE_S
    differs = False
    while not store.check([*map(_arrival_of, range(1, world.size))]):
        now = time.monotonic()
        if not differs and store.check([_DIFFERS]):
            differs, deadline = True, min(deadline, now + _PROBLEM_S)
        if now > min(deadline, notice):
            ranks = range(1, world.size)
            missing = [rank for rank in ranks if not store.check([_arrival_of(rank)])]
            if now > deadline:
                return missing
            notice += _REPEAT_S
            waited = f"({now - started:.0f} of {limit_s:.0f} s)"
            sys.stderr.write(f"trainyard: waiting for {_ranks(missing)} {waited}\n")
        time.sleep(_POLL_S)
    return []


def _values(store: "Store", ranks: list[int]) -> list[bytes]:
    return store.multi_get([*map(_arrival_of, ranks)]) if ranks else []


def _loaded(content: bytes) -> _Arrival:
    process, address, differs = json.loads(content)
    return _Arrival(ProcessInfo(*process), address, differs)


def _disagreement(me: ProcessInfo, arrivals: Mapping[int, _Arrival]) -> InputError | None:
    others = [rank for rank, arrival in arrivals.items() if arrival.differs]
    if not others:
        return None
    rank, more = others[0], len(others) - 1
    process, changes = arrivals[rank].process, "; ".join(arrivals[rank].differs[:NAMED])
    others_too = f" ({more} more {'rank differs' if more == 1 else 'ranks differ'})" * (more > 0)
    return InputError(
        "rank.run-differs",
        "rank {rank} ({host}, process {pid}) does not run what rank 0 ({first_host}, process "
        "{first_pid}) runs: {changes}{more}",
        rank=rank,
        host=process.host,
        pid=process.pid,
        first_host=me.host,
        first_pid=me.pid,
        changes=changes,
        more=others_too,
    )


def _arrival_of(rank: int) -> str:
    return f"arrival/{rank}"


def _answer_to(rank: int) -> str:
    return f"answer/{rank}"


def _ranks(ranks: list[int]) -> str:
    """rank 3; ranks 1, 2 and 9 more."""
    return f"rank{'s' * (len(ranks) > 1)} {_listed(map(str, ranks))}"


def _listed(words: Iterable[str]) -> str:
    words = list(words)
    more = len(words) - NAMED
    return ", ".join(words[:NAMED]) + f" and {more} more" * (more > 0)
