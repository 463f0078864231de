"""The activity of a rank, as threads beside the training thread see it, and the ranks that hang."""

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple, ParamSpec

from trainyard.distributed.process_info import NAMED

P = ParamSpec("P")

BEGINNING = 4
"""Factor on the limit before the first step is done: a rank reads indexes and compiles."""
_ORDER = ("data", "step")  # phases of a step, in order; evaluations and saves follow


class Activity(NamedTuple):
    """A rank at one moment."""

    step: int = 0
    doing: str = "start"
    silent_s: float = 0.0
    """Time since the last progress."""
    limit_s: float = 0.0
    """Largest `silent_s` that is allowed; 0: any."""

    @property
    def is_overdue(self) -> bool:
        return 0 < self.limit_s < self.silent_s

    @property
    def position(self) -> tuple[int, int]:
        """How far the rank is: its step, and the phase of that step."""
        return self.step, _ORDER.index(self.doing) if self.doing in _ORDER else len(_ORDER)

    def __str__(self) -> str:
        if not self.step:
            return self.doing
        return f"step {self.step:,}" + (f" ({self.doing})" if self.doing != "step" else "")


class Heartbeat:
    """Progress marks of the training thread."""

    def __init__(self) -> None:
        self.limit_s = 0.0
        self.limits_of: dict[str, float] = {}
        """Limits in seconds of activities that have their own, by the name in a mark; 0: none."""
        self.clock_s = 0.0
        """Seconds that a watchdog has counted. It stands still while the process is suspended."""
        # Step, activity and time in one tuple, since another thread reads it at any time.
        self._marked = 0, "start", 0.0
        self._first_step = 0  # the first step of this process

    def mark(self, doing: str, step: int = 0) -> None:
        """`step`: the step under way, or the last one for an activity between steps."""
        self._first_step = self._first_step or step * (doing == "data")
        self._marked = step, doing, self.clock_s

    def counted(self, doing: str, show: Callable[P, None]) -> Callable[P, None]:
        """Wrap `show`, which receives a count: each call also marks progress."""

        def mark_and_show(*args: P.args, **kwargs: P.kwargs) -> None:
            self.mark(doing)
            show(*args, **kwargs)

        return mark_and_show

    @property
    def usual_limit_s(self) -> float:
        """The limit of an activity that has none of its own."""
        has_begun = self._marked[0] > self._first_step > 0
        return self.limit_s * (1 if has_begun else BEGINNING)

    def activity(self) -> Activity:
        usual_s = self.usual_limit_s
        step, doing, since = self._marked
        limit_s = self.limits_of.get(doing, usual_s) if usual_s else 0
        return Activity(step, doing, self.clock_s - since, limit_s)


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
    verdicts = []
    for rank in ranks[:NAMED]:
        name, seen = names[rank], activities[rank]
        text = f"{name} has made no progress for {seen.silent_s:.0f} s in {seen}"
        if rank in silent:
            text = (
                f"{name} has not answered for {seen.silent_s:.0f} s (last seen in {seen}): it is "
                "stopped, or a call holds Python's lock"
            )
        verdicts.append(text)
    if len(ranks) > NAMED:
        verdicts.append(f"and {len(ranks) - NAMED} more")
    if len(ranks) < len(activities):
        verdicts.append(f"the others wait for {'it' if len(ranks) == 1 else 'them'}")
    return "; ".join(verdicts)
