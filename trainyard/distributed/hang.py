"""The ranks that hang, by the activity of all."""

from collections.abc import Mapping, Set

from trainyard.distributed.heartbeat import Activity
from trainyard.distributed.process_info import NAMED


def hanging(activities: Mapping[int, Activity], silent: Set[int]) -> list[int] | None:
    """The ranks for which the others wait. [] if that is not known, None if none hangs.

    `silent`: the ranks that do not answer. Of the others, those furthest behind are the cause: the
    rank that is still in the data of a step while the others are in the step itself.
    """
    overdue = {rank for rank, seen in activities.items() if seen.is_overdue}
    if overdue_and_silent := sorted(overdue & silent):
        return overdue_and_silent
    last = min(seen.position for seen in activities.values())
    behind = {rank for rank, seen in activities.items() if seen.position == last}
    if 1 < len(activities) == len(behind):
        return [] if overdue == behind else None
    return sorted(overdue & behind) or None


def described(
    ranks: list[int],
    names: Mapping[int, str],
    activities: Mapping[int, Activity],
    silent: Set[int],
) -> str:
    """The verdict in one line. `ranks`: as `hanging` returns them."""
    if not ranks:
        seen = min(activities.values(), key=lambda seen: seen.silent_s)
        return (
            f"no rank has made progress for {seen.silent_s:.0f} s: all are in {seen}, where they "
            "wait for one of them or for the network"
        )
    verdicts = [_verdict(names[rank], activities[rank], rank in silent) for rank in ranks[:NAMED]]
    if len(ranks) > NAMED:
        verdicts.append(f"and {len(ranks) - NAMED} more")
    if len(ranks) < len(activities):
        verdicts.append(f"the others wait for {'it' if len(ranks) == 1 else 'them'}")
    return "; ".join(verdicts)


def _verdict(name: str, seen: Activity, is_silent: bool) -> str:
    if is_silent:
        return (
            f"{name} has not answered for {seen.silent_s:.0f} s (last seen in {seen}): it is "
            "stopped, or a call holds Python's lock"
        )
    return f"{name} has made no progress for {seen.silent_s:.0f} s in {seen}"
