"""A thread beside training: every rank hears within seconds that one is gone or hangs.

Each rank posts its activity to torch's key-value store once a second. A rank is lost when its
process has ended, which the ranks on its host see, or when its posts stop. It hangs when it makes
no progress for too long and does not wait for another rank. The rank that finds this posts an
alarm; every rank reads it, and cuts its connections to other ranks, so that a training thread that
waits for a message gets an error in its place. A rank that is only slow raises no alarm.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from trainyard.distributed.hang import described, hanging
from trainyard.distributed.heartbeat import Activity, Heartbeat
from trainyard.distributed.process_info import NAMED, ProcessInfo, rank_name
from trainyard.distributed.stacks import Stacks
from trainyard.world import World, cut_connections

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_S = 1
"""Between two posts of a rank."""
FRESH_S = 10
"""Age of a post from which on its rank does not answer: it is stopped, or holds Python's lock."""
GONE_S = 30
"""Age of a post from which on its rank is lost, where nothing else can be seen of its process."""

_ALONE = World()
_ARM_S = 30  # the most between two renewals of the timer that ends a process without Python
_CULPRIT_S = 3  # for the culprit to be found after a connection broke
_LEAVE_S = 5  # for the other ranks to hear of an alarm and leave, before the store of rank 0 goes
_WAKE_S = 30  # for a training thread that waits for its GPU to come back
_STUCK_S = 3  # in which a training thread does nothing at all, though all connections are cut
_IDLE_S = 0.01  # processor time of a thread that does nothing
_LOOK_S = 0.02


class Alarm(NamedTuple):
    ranks: list[int]
    """The ranks that are gone, or hang. Empty if it is not known which are."""
    verdict: str = ""
    """The reason why these ranks hang."""


class Watchdog:
    """Alone, without a store, it looks only whether its own rank hangs."""

    def __init__(
        self,
        store: "Store | None" = None,
        world: World = _ALONE,
        processes: Sequence[ProcessInfo] = (),
        *,
        is_hosted: bool = False,
    ) -> None:
        """`store`: for this start alone. `is_hosted`: it is not in the process of rank 0."""
        self.heartbeat = Heartbeat()
        self.has_alarm = False
        self.alarm = Alarm([])
        self.before_end: Callable[[], None] = lambda: None
        """Finishes work that must not be lost when this process is ended; has its own limit."""
        self.uses_gpu = False
        """A training thread that waits for its GPU is given longer to come back."""
        self._store, self._world, self._is_hosted = store, world, is_hosted
        me = ProcessInfo.current()
        self._processes = [*processes] or [me]
        self._visible = {
            rank: process
            for rank, process in enumerate(self._processes)
            if rank != world.rank and process.is_visible_from(me)
        }
        watched = range(1, world.size) if world.is_first else (0,)
        self._posts = {rank: _Post(b"", time.monotonic()) for rank in watched}
        self._beats, self._is_on, self._first_has_left = 0, True, False
        self._stacks: Stacks | None = None
        self._armed = 0.0
        self._is_closed = False
        self._wake, self._has_heard = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def reason(self) -> str:
        """The reason of the alarm, in one line."""
        names = ", ".join(map(self._name, self.alarm.ranks[:NAMED])) or "another rank"
        return self.alarm.verdict or f"{names} is gone; see its output"

    @property
    def speaker(self) -> int:
        """The rank that prints an alarm for all: the first one that is left."""
        return min(set(range(self._world.size)) - {*self.alarm.ranks}, default=0)

    def begin(self, limit_s: float) -> None:
        """From now on, a rank hangs after so many seconds without progress. 0 turns that off."""
        self.heartbeat.limit_s, self._is_on = limit_s, limit_s > 0
        self.heartbeat.mark("start")

    def write_to(self, folder: Path) -> None:
        """Set the folder for the stacks of all threads, which are written if a rank hangs."""
        if self.heartbeat.limit_s:
            self._stacks = Stacks(folder, self._world.rank)

    def hear(self) -> None:
        """The training thread has met a broken connection. Returns once there is an alarm."""
        self._has_heard.set()
        self._wake.set()
        deadline = time.monotonic() + _CULPRIT_S
        while not self.has_alarm and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if not self.has_alarm:
            with suppress(RuntimeError):
                self._take(self._post(Alarm([])))
        self.has_alarm = True
        cut_connections()

    def close(self, *, in_peace: bool) -> None:
        """Stop watching. The other ranks take this for a loss, unless it is `in_peace`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._has_heard.set()
        self._wake.set()
        self._thread.join()
        if self._stacks is not None:
            self._stacks.close()
        if self._store is not None:
            with suppress(RuntimeError):  # the store is gone with rank 0
                self._leave(self._store, in_peace=in_peace)

    def _leave(self, store: "Store", *, in_peace: bool) -> None:
        if not in_peace and not self.has_alarm:
            self._post(Alarm([self._world.rank]))
        store.set(f"left/{self._world.rank}", "")
        if not self._world.is_first or self._is_hosted:
            return
        # A rank that hangs still hears of it; one that is gone does not.
        gone = () if self.alarm.verdict else self.alarm.ranks
        waiting = set(range(1, self._world.size)) - {*gone}
        deadline = time.monotonic() + _LEAVE_S
        while waiting and time.monotonic() < deadline:
            waiting = {rank for rank in waiting if not self._has_left(rank)}
            time.sleep(_LOOK_S if waiting else 0)

    # --- its thread ---

    def _run(self) -> None:
        try:
            alarm = self._watch()
        except Exception as error:  # without a watchdog nobody would notice a loss
            me = self._world.rank
            alarm = Alarm([me], f"the watchdog of {self._name(me)} failed: {error!r}")
        if alarm is not None:
            with suppress(RuntimeError):
                alarm = self._post(alarm)
            self._act_on(alarm)

    def _watch(self) -> Alarm | None:
        """Returns at an alarm, or with None when it is closed."""
        may_fall_silent = not (self._world.is_first or self._is_hosted)
        while not self._is_closed:
            self._arm()
            try:
                alarm = self._beat_in_time() if may_fall_silent else self._beat()
            except RuntimeError:
                return self._without_store()
            if alarm is not None:
                return alarm
            begun = time.monotonic()
            self._wake.wait(BEAT_S)
            self._wake.clear()
            self._forgive(time.monotonic() - begun - BEAT_S)
        return None

    def _beat_in_time(self) -> Alarm | None:
        """A beat in a thread of its own, since a store does not answer while rank 0 is stopped."""
        beat: Future[Alarm | None] = Future()

        def run() -> None:
            try:
                beat.set_result(self._beat())
            except BaseException as error:
                beat.set_exception(error)

        threading.Thread(target=run, name="beat", daemon=True).start()
        while True:
            begun = time.monotonic()
            with suppress(TimeoutError):
                return beat.result(timeout=BEAT_S)
            self._forgive(time.monotonic() - begun - BEAT_S)
            self._arm()
            ages, activity = self._stale(), self.heartbeat.activity()
            alarm = self._verdict(activity, ages, set()) if self._is_on else None
            if alarm is not None:
                self._store = None  # the next call would not return either
                return alarm

    def _beat(self) -> Alarm | None:
        activity = self.heartbeat.activity()
        if self._store is None:
            return self._hanging({0: activity}, set())
        self._beats += 1
        self._store.set(_key(self._world.rank), json.dumps([self._beats, *activity]))
        if self._store.check(["alarm"]):
            return _loaded(self._store.get("alarm"))
        self._first_has_left = self._first_has_left or self._has_left(0)
        ended = [rank for rank, process in self._visible.items() if process.has_ended()]
        if lost := [rank for rank in ended if not self._has_left(rank)]:
            return Alarm(lost)
        return self._judge(self._store, activity) if self._is_on else None

    def _judge(self, store: "Store", activity: Activity) -> Alarm | None:
        """Rank 0 looks at all others; each of them looks at rank 0."""
        self._look_at_posts(store)
        ages = self._stale()
        left = {rank for rank in ages if self._has_left(rank)}
        silent = {rank: age for rank, age in ages.items() if rank not in left}
        return self._verdict(activity, silent, left)

    def _stale(self) -> dict[int, float]:
        """The ages of the posts of ranks that do not answer."""
        now = time.monotonic()
        ages = {rank: now - post.at for rank, post in self._posts.items()}
        return {rank: age for rank, age in ages.items() if age > FRESH_S}

    def _verdict(self, activity: Activity, ages: dict[int, float], left: set[int]) -> Alarm | None:
        """`ages`: as of `_stale`. `left`: further ranks, whose posts have ended in peace."""
        remote = sorted(ages.keys() - self._visible.keys())
        if lost := [rank for rank in remote if ages[rank] > GONE_S]:
            return Alarm(lost)
        if not self._world.is_first and not ages:
            return None  # rank 0 judges itself
        activities = {
            rank: self._without_answer(seen, ages[rank]) if rank in ages else seen
            for rank in self._posts.keys() - left
            for seen in [self._posts[rank].activity]
        }
        return self._hanging(activities | {self._world.rank: activity}, {*ages})

    def _without_answer(self, seen: Activity, age: float) -> Activity:
        """The activity of a rank whose last post has this age.

        Its limit is the usual one of this rank: its own may have been that of its beginning, and a
        rank that waits for a disk answers.
        """
        silent_s = age if seen.doing in self.heartbeat.limits_of else seen.silent_s + age
        return seen._replace(silent_s=silent_s, limit_s=self.heartbeat.usual_limit_s)

    def _look_at_posts(self, store: "Store") -> None:
        ranks = [*self._posts]
        if not store.check([_key(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if store.check([_key(rank)])]  # others are yet to post
        now = time.monotonic()
        for rank, data in zip(ranks, store.multi_get([*map(_key, ranks)]), strict=True):
            if self._posts[rank].data != data:
                self._posts[rank] = _Post(data, now)

    def _hanging(self, activities: dict[int, Activity], stale: set[int]) -> Alarm | None:
        ranks = hanging(activities, stale)
        if ranks is None:
            return None
        names = {rank: self._name(rank) for rank in activities}
        verdict = described(ranks, names, activities, stale)
        if self._stacks is not None:
            verdict += f"; stacks in {self._stacks.path.parent}"
        return Alarm(ranks, verdict)

    def _post(self, alarm: Alarm) -> Alarm:
        """Post an alarm, unless there is one. Returns the one that is there."""
        if self._store is None:
            return alarm
        # Prefixed stores compare with a value; an absent key is taken for "".
        return _loaded(self._store.compare_set("alarm", "", json.dumps(alarm)))

    def _without_store(self) -> Alarm | None:
        """The store is gone: with rank 0, or with the agent of a launcher, which ends the ranks."""
        return None if self._is_hosted or self._first_has_left else Alarm([0])

    def _take(self, alarm: Alarm) -> None:
        self.alarm, self.has_alarm = alarm, True

    def _act_on(self, alarm: Alarm) -> None:
        if alarm.verdict and self._stacks is not None:
            self._stacks.write()  # before training threads hear of it, and go elsewhere
        self._take(alarm)
        cut_connections()
        if alarm.verdict:
            self._end_hanging()
        if self._stacks is not None:
            self._stacks.disarm()  # the training thread may wait long for a checkpoint
        self._wait_for_training()

    def _end_hanging(self) -> None:
        """End this process if it hangs, and kill those beside it that are stopped."""
        if self._world.rank in self.alarm.ranks:
            is_alone = len(self.alarm.ranks) == self._world.size and self._world.is_first
            self._end_process(self.reason if is_alone else "")
        for rank in self.alarm.ranks:
            if rank in self._visible:
                self._visible[rank].kill_if_stopped()

    def _wait_for_training(self) -> None:
        """Until the training thread has heard of the alarm; end the process if it cannot.

        A thread may not come back from its GPU. Nor does one from a message that was cut short:
        gloo tells neither its sender nor its receiver (`Pair::signalException`, transport/tcp).
        """
        begun = since = time.monotonic()
        busy_s = self.heartbeat.busy_s()
        while not self._has_heard.wait(timeout=1):
            now, seen = time.monotonic(), self.heartbeat.activity()
            if self.heartbeat.busy_s() > busy_s + _IDLE_S or not seen.waits:
                busy_s, since = self.heartbeat.busy_s(), now
            is_stuck = now > since + _STUCK_S and not self.uses_gpu
            if is_stuck or (now > begun + _WAKE_S and (seen.waits or seen.is_overdue)):
                self.before_end()
                self._end_process(self.reason if self._world.rank == self.speaker else "")

    def _end_process(self, message: str) -> NoReturn:
        """End with exit code 1 at once, since the training thread cannot."""
        if message:
            sys.stderr.write(f"trainyard: {message}\n")
            sys.stderr.flush()
        if self._store is not None:
            with suppress(RuntimeError):
                self._leave(self._store, in_peace=False)
        os._exit(1)

    # --- what it knows of ranks ---

    def _name(self, rank: int) -> str:
        return rank_name(rank, self._processes[rank])

    def _has_left(self, rank: int) -> bool:
        return self._store is not None and self._store.check([f"left/{rank}"])

    # --- hangs of this process ---

    def _arm(self) -> None:
        """Renew the timer that ends this process where Python cannot run any more."""
        limit_s, now = self.heartbeat.limit_s, time.monotonic()
        every_s = min(limit_s / 4, _ARM_S)
        if self._stacks is not None and now > self._armed + every_s / 2:
            self._armed = now
            # Later than the others take to find out that this thread does not answer.
            allowed_s = self.heartbeat.activity().limit_s + 3 * every_s + 1.5 * FRESH_S
            self._stacks.arm(allowed_s)

    def _forgive(self, late_s: float) -> None:
        """After a stop of this process no rank can have been heard, nor made progress here."""
        if late_s > FRESH_S / 2:
            self.heartbeat.forgive()
            now = time.monotonic()
            self._posts = {rank: post._replace(at=now) for rank, post in self._posts.items()}


def _loaded(data: bytes) -> Alarm:
    return Alarm(*json.loads(data))


def _key(rank: int) -> str:
    return f"beat/{rank}"


class _Post(NamedTuple):
    data: bytes
    at: float
    """Time at which this rank saw the data first."""

    @property
    def activity(self) -> Activity:
        _, *fields = json.loads(self.data or b"[0]")
        return Activity(*fields)
