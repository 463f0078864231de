"""Threads beside training, which end this process if a rank is gone or hangs.

One posts this rank's activity to torch's key-value store once a second, reads those of others, and
looks whether processes on this host have ended. The other one judges what the first has seen, also
while the store does not answer. A rank is lost when its process has ended, or when its posts stop.
It hangs when it makes no progress for too long and no other rank is further behind. The rank that
finds this posts an alarm; every rank reads it, completes a pending checkpoint and ends, since its
training thread may wait for ever. A rank that is only slow raises no alarm.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from trainyard.distributed.heartbeat import Activity, Heartbeat, described, hanging
from trainyard.distributed.process_info import NAMED, ProcessInfo, rank_name
from trainyard.distributed.stacks import Stacks
from trainyard.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

BEAT_S = 1
"""Between two posts of a rank."""
FRESH_S = 10
"""Age of a post from which on its rank does not answer: it is stopped, or holds Python's lock."""
GONE_S = 30
"""Age of a post from which on its rank is lost, where nothing else can be seen of its process."""

_ALONE = World()
_NOBODY: Mapping[int, ProcessInfo] = MappingProxyType({})
_OWN_ERROR_S = 2  # after the loss of a rank, for an error of this rank's own
_EXPLAINED_S = 7  # at most, after an error of this rank, for the loss of another one to be seen
_SILENT_S = 4  # age of a post from which on its rank may be the reason for others' errors
_LEAVE_S = 5  # for an answer of the store, and for the other ranks before the store of rank 0 goes
_END_S = 330  # for a pending checkpoint, which has limits of its own, and the last message
_LOOK_S = 0.02
_SILENT = "silent"


class Alarm(NamedTuple):
    ranks: list[int]
    """The ranks that are gone, or hang. Empty if it is not known which ones hang."""
    verdict: str = ""
    """The reason why these ranks hang."""
    are_silent: bool = False
    """They hang and do not answer, so that they cannot end themselves."""

    @property
    def absent(self) -> list[int]:
        """The ranks that take no part in the end. Others that hang do: they may have to save."""
        return [] if self.verdict and not self.are_silent else self.ranks


class _Post(NamedTuple):
    data: bytes
    at: float
    """This rank's `clock_s` when it saw the data first."""

    @property
    def activity(self) -> Activity:
        _, *fields = json.loads(self.data or b"[0]")
        return Activity(*fields)


class Watchdog:
    """Alone, without a store, it looks only whether its own rank hangs."""

    def __init__(
        self,
        store: "Store | None" = None,
        world: World = _ALONE,
        processes: Mapping[int, ProcessInfo] = _NOBODY,
        *,
        is_hosted: bool = False,
    ) -> None:
        """`store`: for this start alone. `processes`: of the ranks that are known, with rank 0.
        `is_hosted`: the store is not in the process of rank 0.
        """
        self.heartbeat = Heartbeat()
        self.before_end: Callable[[], None] = lambda: None
        """Finishes work that must not be lost when this process is ended; has its own limit."""
        self.record: Callable[[str, str], str] = lambda event, reason: reason
        """Records the event for all ranks. Returns the message to print."""
        self._store, self._world, self._is_hosted = store, world, is_hosted
        me = ProcessInfo.current()
        self._processes = processes
        self._visible = {
            rank: process
            for rank, process in processes.items()
            if rank != world.rank and process.is_visible_from(me)
        }
        watched = () if store is None else range(1, world.size) if world.is_first else (0,)
        self._posts = {rank: _Post(b"", 0) for rank in watched}
        self._is_on = True
        self._stacks: Stacks | None = None
        self._alarm: Alarm | None = None
        self._explained: Exception | None = None
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if store is not None:
            self._threads.append(
                threading.Thread(target=self._talk, args=[store], name="beat", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def begin(self, limit_s: float) -> None:
        """From now on, a rank hangs after so many seconds without progress. 0 turns that off."""
        self.heartbeat.limit_s, self._is_on = limit_s, limit_s > 0
        self.heartbeat.mark("start")

    def write_to(self, folder: Path) -> None:
        """Set the folder for the stacks of all threads, which are written if a rank hangs."""
        if self.heartbeat.limit_s:
            self._stacks = Stacks(folder, self._world.rank)

    @contextmanager
    def attributing_errors(self) -> Iterator[None]:
        """Inside, an error that follows from the loss of a rank ends the process by an alarm."""
        try:
            yield
        except Exception as error:
            if self._store is not None and not getattr(error, "is_shared", False):
                self._attribute(self._store, error)
            raise

    def _attribute(self, store: "Store", error: Exception) -> None:
        """Returns if the error is this rank's own."""
        # Torch raises a RuntimeError for a lost rank, as for much else.
        if not isinstance(error, RuntimeError) or error is self._explained:
            return
        self._explained = error
        first = last = _within(_LEAVE_S, partial(_silent_ranks, store))
        for _ in range(_EXPLAINED_S):
            time.sleep(BEAT_S)
            last = _within(_LEAVE_S, partial(_silent_ranks, store))
            if last is None or (last[1:] and last != first):
                break
        silent = [0] if last is None or last == first else [*map(int, last[1:])]
        if silent and self._world.rank not in silent:
            self._alarm = Alarm(silent)
            threading.Event().wait()  # for the other thread to end this process

    def close(self, *, failed: bool = False) -> None:
        """Stop watching. The other ranks take this for a loss if it is `failed`."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._store is not None:
            _within(2 * _LEAVE_S, partial(self._leave, self._store, failed=failed))
        for thread in self._threads:  # one that is inside torch as Python ends aborts the process
            thread.join(_LEAVE_S)
        if self._stacks is not None:
            self._stacks.close()

    def _leave(self, store: "Store", *, failed: bool) -> None:
        if failed:
            self._post(store, Alarm([self._world.rank]))
        store.set(_left(self._world.rank), "")
        self._await_others(store, ())

    def _await_others(self, store: "Store", gone: Sequence[int]) -> None:
        """On rank 0, whose process has the store: until the others have left."""
        waiting = set(range(1, self._world.size)) - {*gone}
        deadline = time.monotonic() + _LEAVE_S
        if not self._world.is_first or self._is_hosted or not waiting:
            return
        while not store.check([*map(_left, waiting)]):
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)

    # --- the thread that talks to the store ---

    def _talk(self, store: "Store") -> None:
        """Until the watch is over. A call may take for ever: rank 0 may be stopped."""
        beats, first_has_left = 0, False
        try:
            while not self._closing.is_set() and self._alarm is None:
                beats += 1
                store.set(_beat(self._world.rank), json.dumps([beats, *self.heartbeat.activity()]))
                if store.check(["alarm"]):
                    self._alarm = _loaded(store.get("alarm"))
                    return
                first_has_left = first_has_left or store.check([_left(0)])
                ended = [rank for rank, process in self._visible.items() if process.has_ended()]
                if lost := [rank for rank in ended if not store.check([_left(rank)])]:
                    self._alarm = Alarm(lost)
                    return
                self._read_posts(store)
                self._closing.wait(BEAT_S)
        except RuntimeError:  # the store is gone: with rank 0, or with the agent of a launcher,
            self._posts.clear()  # which ends the ranks itself
            if not (self._is_hosted or first_has_left or self._closing.is_set()):
                self._alarm = Alarm([0])

    def _read_posts(self, store: "Store") -> None:
        ranks = [*self._posts]
        if not all(post.data for post in self._posts.values()):
            ranks = [rank for rank in ranks if store.check([_beat(rank)])]  # others are yet to post
        now = self.heartbeat.clock_s
        for rank, data in zip(ranks, store.multi_get([*map(_beat, ranks)]), strict=True):
            if self._posts[rank].data != data:
                self._posts[rank] = _Post(data, now)
            elif now - self._posts[rank].at > FRESH_S and store.check([_left(rank)]):
                del self._posts[rank]
        if self._world.is_first:
            late = [rank for rank, post in self._posts.items() if now - post.at > _SILENT_S]
            silent = [rank for rank in late if not store.check([_left(rank)])]
            store.set(_SILENT, json.dumps([now, *silent]))

    # --- the thread that judges ---

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(BEAT_S):
            passed_s, before = time.monotonic() - before, time.monotonic()
            self.heartbeat.clock_s += min(passed_s, 2 * BEAT_S)
            alarm = self._alarm or (self._alarm_at(self.heartbeat.clock_s) if self._is_on else None)
            if alarm is not None:
                self._end(alarm)

    def _alarm_at(self, now: float) -> Alarm | None:
        """Rank 0 looks at all others; each of them at rank 0, or at itself once that is gone."""
        posts = dict(self._posts)
        silent = {rank for rank, post in posts.items() if now - post.at > FRESH_S}
        remote = sorted(silent - self._visible.keys())
        if lost := [rank for rank in remote if now - posts[rank].at > GONE_S]:
            return Alarm(lost)
        if posts and not (self._world.is_first or silent):
            return None  # rank 0 judges itself
        seen = {rank: post.activity for rank, post in posts.items()}
        for rank in silent:
            age, usual_s = now - posts[rank].at, self.heartbeat.usual_limit_s
            seen[rank] = seen[rank]._replace(silent_s=age, limit_s=usual_s)
        seen[self._world.rank] = self.heartbeat.activity()
        ranks = hanging(seen, silent)
        if ranks is None:
            return None
        verdict = described(ranks, {rank: self._name(rank) for rank in seen}, seen, silent)
        if self._stacks is not None:
            verdict += f"; stacks in {self._stacks.path.parent}"
        return Alarm(ranks, verdict, not silent.isdisjoint(ranks))

    def _post(self, store: "Store", alarm: Alarm) -> Alarm:
        """Post an alarm, unless there is one. Returns the one that is there."""
        # Prefixed stores compare with a value; an absent key is taken for "".
        return _loaded(store.compare_set("alarm", "", json.dumps(alarm)))

    # --- the end ---

    def _end(self, alarm: Alarm) -> None:
        """End the process, unless its training thread ends it with an error of its own."""
        if self._store is not None:
            alarm = _within(_LEAVE_S, partial(self._post, self._store, alarm)) or alarm
        if alarm.verdict and self._stacks is not None:
            _within(_LEAVE_S, self._stacks.write)
        if alarm.are_silent:
            for rank in self._visible.keys() & {*alarm.ranks}:
                self._visible[rank].end()
        if alarm.verdict or not self._closing.wait(_OWN_ERROR_S):
            self._exit(alarm)

    def _exit(self, alarm: Alarm) -> NoReturn:
        if self._store is not None:
            _within(_LEAVE_S, partial(self._store.set, _left(self._world.rank), ""))
        _within(_END_S, partial(self._finish, alarm))
        _within(_LEAVE_S, sys.stdout.flush)
        if self._store is not None:
            _within(2 * _LEAVE_S, partial(self._await_others, self._store, alarm.absent))
        os._exit(1)

    def _finish(self, alarm: Alarm) -> None:
        """Complete the pending checkpoint. The first rank that is left prints why all end.

        So does one that has judged itself, since no other one knows of it.
        """
        seen = self.heartbeat.activity()
        if not (seen.is_overdue and seen.doing in self.heartbeat.limits_of):  # not one that hangs
            self.before_end()
        first = min({*range(self._world.size)} - {*alarm.absent}, default=0)
        is_alone = not self._posts and alarm.ranks == [self._world.rank]
        if is_alone or self._world.rank == first:
            names = ", ".join(map(self._name, alarm.ranks[:NAMED]))
            reason = alarm.verdict or f"{names} is gone; see its output"
            message = self.record("rank hangs" if alarm.verdict else "rank gone", reason)
            os.write(2, f"trainyard: {message}\n".encode())

    def _name(self, rank: int) -> str:
        known = self._processes.get(rank)
        return rank_name(rank, known) if known else f"rank {rank}"


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of a call, or None if it takes longer or fails since the store is gone."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(call())
        except RuntimeError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _loaded(data: bytes) -> Alarm:
    return Alarm(*json.loads(data))


def _silent_ranks(store: "Store") -> list[float]:
    """The ranks that are silent, as the first rank said it at last; before them, when it did.

    If it has left, it says nothing, and that anew each time.
    """
    if store.check([_left(0)]):
        return [time.monotonic()]
    return list(json.loads(store.get(_SILENT))) if store.check([_SILENT]) else []


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _left(rank: int) -> str:
    return f"left/{rank}"
