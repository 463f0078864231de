"""Which ranks hang, and what there is to say of them."""

import time
from collections.abc import Iterable, Mapping

from trainyard.rendezvous.pulse import Sighting

ANSWER_S = 10
"""For a rank's watch to answer: one that does not is stopped, or holds Python's lock."""

NAMED = 8
"""Ranks that a message names; more are counted."""


class Round:
    """The first rank asks all others how far they are; what it knows of them by now."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.number, self.asked = 0, time.monotonic()
        self._seen = {rank: (Sighting(), self.asked) for rank in ranks}
        self._missing: set[int] = set()
        self._is_concluded = True

    def ask(self, ranks: Iterable[int]) -> None:
        """A new round, of those that are still there."""
        self._is_concluded = False
        self.number, self.asked, self._missing = self.number + 1, time.monotonic(), set(ranks)

    def hear(self, rank: int, number: int, sighting: Sighting) -> None:
        self._seen[rank] = sighting, time.monotonic()
        if number == self.number:
            self._missing.discard(rank)

    def leave(self, rank: int) -> None:
        self._seen.pop(rank, None)
        self._missing.discard(rank)

    def forgive(self) -> None:
        """What is known is from before this process was stopped."""
        now = time.monotonic()
        self._seen = {
            rank: (seen._replace(silent_s=0), now) for rank, (seen, _) in self._seen.items()
        }

    @property
    def is_over(self) -> bool:
        return not self._missing or time.monotonic() > self.asked + ANSWER_S

    def conclude(self) -> tuple[dict[int, Sighting], set[int]] | None:
        """Once, when a round is over: every rank as it has answered, and those that have not.

        These are taken to have done nothing since they last did, and to be as far as the first.
        """
        if self._is_concluded or not self.is_over:
            return None
        self._is_concluded, now = True, time.monotonic()
        limit_s = self._seen[0][0].limit_s  # not that of a beginning which is over by now
        sightings = {
            rank: seen.later(now - when)._replace(limit_s=limit_s)
            if rank in self._missing
            else seen
            for rank, (seen, when) in self._seen.items()
        }
        return sightings, set(self._missing)


def hanging(sightings: Mapping[int, Sighting], missing: set[int]) -> list[int] | None:
    """The ranks for which the others wait; [] where all wait for each other; None: none hangs.

    `missing`: those that did not answer. One that others wait for may be busy with something long;
    of several that hang, those are meant that are furthest behind.
    """
    overdue = {rank: seen for rank, seen in sightings.items() if seen.is_overdue}
    deaf = sorted(overdue.keys() & missing)
    if deaf:
        return deaf
    busy = {rank: seen.step for rank, seen in overdue.items() if not seen.waits}
    if busy:
        return sorted(rank for rank, step in busy.items() if step == min(busy.values()))
    if not overdue or len(overdue) < len(sightings):
        return None
    return [] if len(overdue) > 1 else list(overdue)


def described(
    ranks: list[int],
    names: Mapping[int, str],
    sightings: Mapping[int, Sighting],
    missing: set[int],
) -> str:
    """One line. `ranks` as `hanging` has them."""
    if not ranks:
        last = min(sightings, key=lambda rank: (sightings[rank].step, rank))
        silent_s = min(seen.silent_s for seen in sightings.values())
        return (
            f"no rank has made progress for {silent_s:.0f} s: all wait for each other or for their "
            f"GPUs (is the network down?); furthest behind, {names[last]} is in "
            f"{_task(sightings[last])} at {sightings[last].where}"
        )
    said = "; ".join(
        f"{names[rank]} has made no progress for {seen.silent_s:.0f} s"
        + (
            f" (last seen in {_task(seen)}) and does not answer: it is stopped, or a call holds "
            "Python's lock"
            if rank in missing
            else f" in {_task(seen)}: it is at {seen.where}"
        )
        for rank, seen in ((rank, sightings[rank]) for rank in ranks[:NAMED])
    )
    if len(ranks) > NAMED:
        said += f"; and {len(ranks) - NAMED} more"
    alone = len(ranks) == len(sightings)
    return said if alone else f"{said}; the others wait for {'it' if len(ranks) == 1 else 'them'}"


def _task(seen: Sighting) -> str:
    if not seen.step:
        return seen.doing
    return f"step {seen.step:,}" + (f" ({seen.doing})" if seen.doing != "step" else "")
