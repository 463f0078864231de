"""When a rank is lost or hangs, all others hear of it, whatever they wait for."""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainyard.rendezvous.hang import ANSWER_S, NAMED, Round, described, hanging
from trainyard.rendezvous.lines import Line
from trainyard.rendezvous.place import Place
from trainyard.rendezvous.pulse import Pulse, Sighting
from trainyard.rendezvous.sleeper import Sleeper, end_process
from trainyard.rendezvous.stacks import Stacks
from trainyard.world import World, cut_connections

_ALONE = World()
_ROUND_S = 30  # the most between two questions after progress
_CUT_S = 1  # for the reason to come, before connections are cut without knowing one
_LOOK_S = 0.02


class Watch:
    """Hears at once when the process of a rank ends, within 10 s when its host does.

    Torch tells only the ranks that a dead one was to talk to; others wait for those. Here the first
    rank has a line to each of the others. When one breaks, it says so on the others and cuts all of
    its own connections, torch's and the lines, and so does each rank that hears of it: whoever
    waits for a message gets an error in its place. A rank that is only slow breaks nothing.

    Nor does one that hangs: by the lines the first rank asks all others now and then since when
    they have made no progress, and where they stand. Who has been silent for too long and does not
    wait for another is told to end, and is lost to the others. See `begin`.
    """

    def __init__(self, lines: Sequence[Line] = (), world: World = _ALONE) -> None:
        self.pulse = Pulse()
        self.has_alarm = False
        self.lost: list[str] = []
        """Who is gone, by name."""
        self.hung: list[int] = []
        """Who of these hangs and must not be waited for."""
        self.verdict = ""
        """What there is to say of those, if any."""
        self._lines, self._world = lines, world
        self._places = {line.rank: line.place for line in lines} | {world.rank: Place.mine()}
        self._present = {line.rank: line for line in lines}
        self._round = Round(self._places if world.is_first else ())
        self._stacks: Stacks | None = None
        self._armed = 0.0
        self._heard, self._first = time.monotonic(), Sighting()  # of the first rank, and what
        self._sleeper = Sleeper(self.pulse)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def reason(self) -> str:
        """Why there is an alarm."""
        lost = ", ".join(self.lost) or "another rank"
        return self.verdict or f"{lost} is gone; its own output says why"

    @property
    def speaker(self) -> int:
        """The rank that tells of an alarm for all: the first one that is left."""
        lost = {int(name.split()[1]) for name in self.lost}  # "rank 3 (…)"
        return min(set(range(self._world.size)) - {*self.hung, *lost}, default=0)

    def begin(self, limit_s: float) -> None:
        """From now on no rank may be without progress for longer than so many seconds (0: may)."""
        self.pulse.limit_s, self._heard = limit_s, time.monotonic()
        self.pulse.mark("start")
        self._wake.send(b".")

    def write_to(self, folder: Path) -> None:
        """Where the stacks of ranks go if one hangs."""
        if self.pulse.limit_s:
            self._stacks = Stacks(folder, self._world.rank)
            self._wake.send(b".")

    def before_end(self, finish: Callable[[], None], *, uses_gpu: bool = False) -> None:
        """Call `finish` before this process is ended because its main thread is stuck.

        A thread that waits for its GPU is given 30 s to come back, any other one 3 s.
        """
        self._sleeper.before_end, self._sleeper.uses_gpu = finish, uses_gpu

    def alarm(self) -> None:
        """The main thread says: all that is still to be said between ranks is lost."""
        self._sleeper.wake()
        deadline = time.monotonic() + _CUT_S
        while not self.has_alarm and time.monotonic() < deadline:
            time.sleep(_LOOK_S)  # a lost peer is noticed here before its watch has said who it is
        self.has_alarm = True
        cut_connections()

    def close(self, *, in_peace: bool) -> None:
        """Stop listening. The others take it for a loss, unless it is `in_peace`."""
        if not self._thread.is_alive() and self._woken.fileno() < 0:
            return
        for line in self._lines if in_peace else ():
            line.send({"leaves": True})
        self._sleeper.wake()
        self._wake.close()
        self._thread.join()
        self._woken.close()
        if self._stacks is not None:
            self._stacks.close()
        for line in self._lines:
            line.close()

    # --- its thread ---

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:  # else nobody would notice that nothing is watched any more
            me = f"rank {self._world.rank} ({self._places[self._world.rank]})"
            self._lose([me], f"the watch of {me} failed: {error!r}", [])
        self._sleeper.wait(self.reason, speaks=self._world.rank == self.speaker)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for line in self._lines:
                selector.register(line, selectors.EVENT_READ, line)
            selector.register(self._woken, selectors.EVENT_READ, None)
            while not self.lost and not self.verdict:
                self._arm()
                begun, timeout_s = time.monotonic(), self._until_next()
                events = selector.select(timeout_s)
                if timeout_s is not None:
                    self._forgive(time.monotonic() - begun - timeout_s)
                for key, _ in events:
                    if key.data is None and not self._woken.recv(64):
                        return
                    if key.data is not None and not self._hear(key.data):
                        selector.unregister(key.data)
                self._look()

    def _hear(self, line: Line) -> bool:
        """Whether there is more to come of it."""
        messages = line.receive()
        if messages is None:
            self._lose([f"{line}"], "", [])
        for message in messages or ():
            if "leaves" in message:
                self._present.pop(line.rank)
                self._round.leave(line.rank)
                return False
            self._take(line, message)
        return messages is not None

    def _take(self, line: Line, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._lose(message["lost"], message["verdict"], message["hung"])
        elif "asks" in message:
            self._heard, self._first = time.monotonic(), Sighting(*message["seen"])
            line.send({"answers": message["asks"], "seen": self.pulse.look()})
        elif "answers" in message:
            self._round.hear(line.rank, message["answers"], Sighting(*message["seen"]))

    def _lose(self, names: list[str], verdict: str, hung: list[int]) -> None:
        """Tell the others, and have the main thread hear of it."""
        if self.lost or self.verdict:
            return
        self.lost, self.hung, self.verdict = names, hung, verdict
        for line in self._lines:
            line.send({"lost": names, "verdict": verdict, "hung": hung})
        if verdict and self._stacks is not None:
            self._stacks.write()  # before main threads hear of it, and go elsewhere
        self.has_alarm = True
        cut_connections()
        if verdict:
            self._end_hanging()
        if self._stacks is not None:
            self._stacks.disarm()  # the main thread may wait long for a checkpoint to be written

    # --- those that hang ---

    @property
    def _every_s(self) -> float:
        return min(self.pulse.limit_s / 4, _ROUND_S)

    def _until_next(self) -> float | None:
        """Until something is to be done, though no message comes."""
        if not self.pulse.limit_s:
            return None
        every_s = self._every_s if self._round.is_over else ANSWER_S
        since_s = time.monotonic() - self._round.asked if self._world.is_first else 0
        return max(every_s - since_s, 0.01)

    def _arm(self) -> None:
        now = time.monotonic()
        if self._stacks is not None and now > self._armed + self._every_s / 2:
            self._armed = now
            # Later than the others take to find out that this thread does not answer.
            self._stacks.arm(self.pulse.look().limit_s + 3 * self._every_s + 1.5 * ANSWER_S)

    def _forgive(self, late_s: float) -> None:
        """No one could make progress, or be heard, while this process was stopped."""
        if late_s > self.pulse.limit_s / 2:
            self.pulse.forgive()
            self._round.forgive()
            self._heard = time.monotonic()

    def _look(self) -> None:
        if not self.pulse.limit_s or self.lost or self.verdict:
            return
        if self._world.is_first:
            self._lead()
            return
        silent_s, limit_s = time.monotonic() - self._heard, self.pulse.look().limit_s
        if 0 in self._present and silent_s > limit_s + self._every_s + ANSWER_S:
            sightings = {0: self._first.later(silent_s), self._world.rank: self.pulse.look()}
            self._convict([0], sightings, {0})

    def _lead(self) -> None:
        """As the first rank: conclude a round, begin the next one."""
        self._round.hear(0, self._round.number, self.pulse.look())
        found = self._round.conclude()
        if found is not None:
            ranks = hanging(*found)
            if ranks is not None:
                self._convict(ranks, *found)
        elif time.monotonic() > self._round.asked + self._every_s and self._round.is_over:
            self._round.ask(self._present)
            for line in self._present.values():
                line.send({"asks": self._round.number, "seen": self.pulse.look()})

    def _convict(self, ranks: list[int], sightings: dict[int, Sighting], missing: set[int]) -> None:
        names = {rank: f"rank {rank} ({place})" for rank, place in self._places.items()}
        verdict = described(ranks, names, sightings, missing)
        if self._stacks is not None:
            verdict += f"; stacks in {self._stacks.path.parent}"
        self._lose([names[rank] for rank in ranks[:NAMED]], verdict, ranks)

    def _end_hanging(self) -> None:
        """Of a rank that hangs its own process, or one beside it that is stopped."""
        if self._world.rank in self.hung:
            speaks = len(self.hung) == self._world.size and self._world.is_first
            end_process(self.reason if speaks else "")
        for rank in self.hung:
            if rank in self._places:
                self._places[rank].kill_if_stopped(self._places[self._world.rank])
