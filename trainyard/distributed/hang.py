"""The ranks that hang, by the activity of all."""

from collections.abc import Mapping

from trainyard.distributed.heartbeat import Activity
from trainyard.distributed.process_info import NAMED


def hanging(activities: Mapping[int, Activity], stale: set[int]) -> list[int] | None:
    """The ranks for which the others wait. [] if all wait for each other, None if none hangs.

    `stale`: the ranks that do not answer. Of several that hang, those furthest behind are returned.
    """
    overdue = {rank: seen for rank, seen in activities.items() if seen.is_overdue}
    deaf = sorted(overdue.keys() & stale)
    if deaf:
        return deaf
    busy = {rank: seen.step for rank, seen in overdue.items() if not seen.waits}
    if busy:
        return sorted(rank for rank, step in busy.items() if step == min(busy.values()))
    if not overdue or len(overdue) < len(activities):
        return None
    return [] if len(overdue) > 1 else list(overdue)


def described(
    ranks: list[int],
    names: Mapping[int, str],
    activities: Mapping[int, Activity],
    stale: set[int],
) -> str:
    """The verdict in one line. `ranks`: as `hanging` returns them."""
    if not ranks:
        last = min(activities, key=lambda rank: (activities[rank].step, rank))
        silent_s = min(seen.silent_s for seen in activities.values())
        return (
            f"no rank has made progress for {silent_s:.0f} s: all wait for each other or for their "
            f"GPUs (is the network down?); furthest behind, {names[last]} is in "
            f"{_task(activities[last])} at {activities[last].where}"
        )
    said = "; ".join(
        f"{names[rank]} has made no progress for {seen.silent_s:.0f} s"
        + (
            f" (last seen in {_task(seen)}) and does not answer: it is stopped, or a call holds "
            "Python's lock"
            if rank in stale
            else f" in {_task(seen)}: it is at {seen.where}"
        )
        for rank, seen in ((rank, activities[rank]) for rank in ranks[:NAMED])
    )
    if len(ranks) > NAMED:
        said += f"; and {len(ranks) - NAMED} more"
    alone = len(ranks) == len(activities)
    return said if alone else f"{said}; the others wait for {'it' if len(ranks) == 1 else 'them'}"


def _task(seen: Activity) -> str:
    if not seen.step:
        return seen.doing
    return f"step {seen.step:,}" + (f" ({seen.doing})" if seen.doing != "step" else "")
