"""The ranks of one pod, and an exit code that tells an operator what to do with the pod.

torchrun ends with 1 for every failure of its ranks, so an operator could not tell a pod that must
come back from one that must not:

0      the run is over
1      failed as often as was allowed, or stopped by hand: the job is over
2, 3   a mistake in the input; diverged: the job is over
143    told to end (SIGTERM), as when its node is drained: the pod comes back, and resumes
"""

import os
import queue
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from trainyard.errors import DivergedError, InputError, Requeued, TrainyardError
from trainyard.launch.ends import (
    NOTICE_S,
    REQUEUE_SIGNALS,
    SHARED_ENDS,
    described,
    first_cause,
    is_last,
    shell_code,
)
from trainyard.launch.job import Job
from trainyard.launch.ranks import OnLine, Ranks, Share
from trainyard.launch.signals import handling

PREEMPTED = shell_code(-signal.SIGTERM)
FAILED = (TrainyardError.exit_code, InputError.exit_code, DivergedError.exit_code)
_LOOK_S = 0.1


@dataclass(frozen=True)
class Place:
    """A pod's place among those of its job."""

    node: int
    num_nodes: int
    ranks: int
    """Ranks per pod."""
    address: str
    """Address of the first pod, where the ranks meet."""
    port: int

    def share(self, job: Job) -> Share:
        return Share(
            job.command,
            first=self.node * self.ranks,
            count=self.ranks,
            size=self.num_nodes * self.ranks,
            node=self.node,
            num_nodes=self.num_nodes,
            address=self.address,
            port=self.port,
        )


# Set by both operators for torchrun: the variables stand for its options.
_NAMES = {
    "node": "PET_NODE_RANK",
    "num_nodes": "PET_NNODES",
    "ranks": "PET_NPROC_PER_NODE",
    "address": "PET_MASTER_ADDR",
    "port": "PET_MASTER_PORT",
}


def place_in(env: Mapping[str, str]) -> Place:
    """The pod's place. InputError if the environment is not that of an operator's pod."""
    texts = {}
    for field, name in _NAMES.items():
        # Early operators set the address under this name alone.
        text = env.get(name, env.get(name.removeprefix("PET_")))
        if text is None:
            raise InputError(
                f"{name} is not set: `launch pod` is what `launch kubernetes` starts in every pod; "
                "on one machine use `launch local`"
            )
        if field != "address" and not text.isdigit():
            raise InputError(f"{name} is {text!r}, which is no whole number")
        texts[field] = text
    address = texts.pop("address")
    return Place(address=address, **{field: int(text) for field, text in texts.items()})


def launch_pod(
    job: Job,
    place: Place,
    *,
    restarts: int,
    grace_s: float,
    on_line: OnLine,
    say: Callable[[str], None],
) -> int:
    """Run this pod's ranks until the run is over or the pod must end. Returns the pod's exit code.

    After a failure the ranks of all pods restart, up to `restarts` times; they wait for each other.
    When another pod is told to end, all ranks save, and those of this pod restart and wait for it;
    that does not count. `on_line` receives the output of the ranks.
    """
    for name in _NAMES.values():
        os.environ.pop(name, None)  # ranks use other variables
    failures, notice = 0, _Notice()
    with handling((signal.SIGTERM,), notice.come):
        while True:
            rank, code = _run(place.share(job), notice, grace_s, on_line)
            if code in (0, InputError.exit_code, DivergedError.exit_code):
                return code
            if notice.has_come:
                return PREEMPTED
            if code == Requeued.exit_code:
                say("another pod was told to end; starting again, to go on when it is back")
                continue
            if is_last(code) or failures == restarts:
                say(described(rank, code))
                return TrainyardError.exit_code
            failures += 1
            say(f"{described(rank, code)}: starting again ({failures} of {restarts})")


class _Notice:
    """Records that this pod must end."""

    has_come = False

    def come(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True


def _run(share: Share, notice: _Notice, grace_s: float, on_line: OnLine) -> tuple[int, int]:
    """The rank that ended the run, and its exit code, or minus the signal that killed it."""
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    ranks = Ranks(share, on_line=on_line, on_end=lambda rank, code: ended.put((rank, code)))
    ends: dict[int, int] = {}
    urges: list[tuple[float, int]] | None = None
    try:
        while len(ends) < share.count:
            with suppress(queue.Empty):
                rank, code = ended.get(timeout=_LOOK_S)
                ends[rank] = code
            if urges is None and (notice.has_come or any(ends.values())):
                urges = _urges(ends, notice, grace_s)
            while urges and time.monotonic() >= urges[0][0]:
                ranks.signal(urges.pop(0)[1])
    finally:
        ranks.stop(grace_s)
        _reap()
    return first_cause(ends)


def _urges(ends: dict[int, int], notice: _Notice, grace_s: float) -> list[tuple[float, int]]:
    """Times and signals for the remaining ranks."""
    now = time.monotonic()
    if notice.has_come:
        return [(now, REQUEUE_SIGNALS[0]), (now + grace_s, signal.SIGKILL)]
    if SHARED_ENDS.issuperset(ends.values()):
        return [(now + grace_s, signal.SIGKILL)]
    end = now + NOTICE_S
    return [(end, signal.SIGTERM), (end + grace_s, signal.SIGKILL)]


def _reap() -> None:
    """Reap orphans of the ranks: this process may be a container's first, their new parent."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
