"""The ranks of one pod, and an exit code that tells an operator what to do with the pod.

torchrun ends with 1 for every failure of its ranks, so an operator could not tell a pod that must
come back from one that must not:

0      the run is over
1      failed as often as was allowed, or stopped by hand: the job is over
2, 3   a mistake in the input; diverged: the job is over
143    told to end (SIGTERM), as when its node is drained: the pod comes back, and resumes
"""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from trainyard.distributed.launcher_variables import whole
from trainyard.errors import DivergedError, InputError, TrainyardError
from trainyard.launch.events import Events, Signal, handling
from trainyard.launch.exit_codes import (
    REQUEUE_SIGNALS,
    REQUEUED,
    describe,
    first_cause,
    is_final,
    shell_code,
)
from trainyard.launch.ranks import Job, Line, Ranks, Share
from trainyard.launch.supervisor import Attempt, Say

PREEMPTED = shell_code(-signal.SIGTERM)
FAILED = (TrainyardError.exit_code, InputError.exit_code, DivergedError.exit_code)
_HERE = "this pod"

# Set by both operators for torchrun: the variables stand for its options.
_ADDRESS = "PET_MASTER_ADDR"
_NUMBERS = ("PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_PORT")


def pod_share(job: Job, env: Mapping[str, str]) -> Share:
    """The ranks of this pod. InputError if the environment is not that of an operator's pod."""
    texts = {}
    for name in (*_NUMBERS, _ADDRESS):
        # Early operators set the address under this name alone.
        text = env.get(name, env.get(name.removeprefix("PET_")))
        if text is None:
            raise InputError(
                f"{name} is not set: `launch pod` is what `launch kubernetes` starts in every pod; "
                "on one machine use `launch local`"
            )
        texts[name] = text
    node, num_nodes, count, port = (whole(name, texts[name]) for name in _NUMBERS)
    return Share(
        job.command,
        first=node * count,
        count=count,
        size=num_nodes * count,
        node=node,
        num_nodes=num_nodes,
        address=texts[_ADDRESS],
        port=port,
    )


def launch_pod(
    share: Share,
    *,
    restarts: int,
    grace_s: float,
    show: Callable[[Line], None],
    say: Say,
) -> int:
    """Run this pod's ranks until the run is over or the pod must end. Returns the pod's exit code.

    After a failure the ranks of all pods restart, up to `restarts` times; they wait for each other.
    When another pod is told to end, all ranks save, and those of this pod restart and wait for it;
    that does not count. `show` receives the output of the ranks.
    """
    for name in (*_NUMBERS, _ADDRESS):
        os.environ.pop(name, None)  # ranks use other variables
    pod, failures = _Pod(share, grace_s, show, say), 0
    with handling((signal.SIGTERM,), lambda number, frame: pod.end()):
        while True:
            rank, code = pod.attempt()
            if code in (0, InputError.exit_code, DivergedError.exit_code):
                return code
            if pod.must_end:
                return PREEMPTED
            if code in REQUEUED:
                say("another pod was told to end; starting again, to go on when it is back")
                continue
            if is_final(code) or failures == restarts:
                say(describe(rank, code))
                return TrainyardError.exit_code
            failures += 1
            say(f"{describe(rank, code)}: starting again ({failures} of {restarts})")


class _Pod:
    """This pod, the only host of its attempts."""

    must_end = False

    def __init__(
        self, share: Share, grace_s: float, show: Callable[[Line], None], say: Say
    ) -> None:
        self._share, self._grace_s, self._show, self._say = share, grace_s, show, say
        self._events = Events()
        self._ranks: Ranks | None = None

    def end(self) -> None:
        """Have the ranks of all pods save."""
        self.must_end = True
        self._events.put(Signal(REQUEUE_SIGNALS[0]))

    def attempt(self) -> tuple[int, int]:
        """The rank that ended the attempt, and its code."""
        attempt = Attempt(
            {_HERE: self},
            {_HERE: self._share},
            self._events,
            show=lambda host, line: self._show(line),
            say=self._say,
            grace_s=self._grace_s,
        )
        try:
            attempt.run()
        finally:
            if self._ranks is not None:
                self._ranks.stop(self._grace_s)
            _reap()
        return first_cause(dict.fromkeys(self._share.ranks, -signal.SIGKILL) | attempt.codes)

    def start(self, share: Share) -> None:
        self._ranks = Ranks(share, self._events.put)

    def signal(self, number: int) -> None:
        if self._ranks is not None:
            self._ranks.signal(number)


def _reap() -> None:
    """Reap orphans of the ranks: this process may be a container's first, their new parent."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
