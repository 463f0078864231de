"""The ranks of this machine, by torch's elastic agent with Trainyard's exit codes.

`launch local` runs it in its own process; pods and hosts of `launch ssh` by `launch agent`.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from trainyard.distributed.interfaces import free_port
from trainyard.distributed.launcher_variables import parse_int
from trainyard.errors import STOPS, InputError, Requeued, TrainyardError
from trainyard.interrupts import is_postponed
from trainyard.launch.exit_codes import (
    GRACE_S,
    LEFT,
    NOTICE_S,
    OVER,
    code_after,
    describe,
    ending_with,
    first_cause,
    is_final,
    is_stop,
    killed,
    meaning_of,
)
from trainyard.launch.job import Say
from trainyard.launch.signals import IMPATIENT_S, KILL_S, handling
from trainyard.parent import LAUNCHER

_RUN = "trainyard"
_MONITOR_S, _LOOK_S = 0.1, 0.01
_BARRIER_S = 0.1  # for agents that have no store in common: 0 would mean for ever
_LOGGERS = (
    *("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api"),
    *("rendezvous.dynamic_rendezvous", "rendezvous.api"),
)
_VARIABLES = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # the agent's store would listen everywhere
}
# Set by Kubeflow's operator for torchrun: the variables stand for its options.
_ADDRESS = "PET_MASTER_ADDR"
_NUMBERS = ("PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The conduct of an agent when ranks end."""

    restarts: int = 0
    """Restarts after failures that may not recur."""
    grace_s: float = GRACE_S
    """Seconds for ranks to save."""
    others_go_on: bool = False
    """True if other agents go on when this one is told to end by SIGTERM: its ranks then end with
    75, after which the ranks of the other agents start again. That is no failure."""


class Agent(LocalElasticAgent):
    """torch's agent, but final exit codes are not restarted, and ranks have time to save."""

    def __init__(self, spec: WorkerSpec, policy: Policy, say: Say) -> None:
        is_alone = isinstance(spec.rdzv_handler, KnownMeetingPoint)
        barrier_s = _BARRIER_S if is_alone else policy.grace_s
        logs = DefaultLogsSpecs(log_dir=os.devnull)  # else a folder in /tmp is left over
        super().__init__(spec, logs, exit_barrier_timeout=barrier_s)
        self._policy, self._say, self._grace_s = policy, say, policy.grace_s

    def codes(self) -> dict[int, int]:
        """Exit codes of the ranks here that have ended."""
        ended = {rank: process.poll() for rank, process in self.processes().items()}
        return {rank: code for rank, code in ended.items() if code is not None}

    def processes(self) -> "dict[int, subprocess.Popen[Any]]":
        """The ranks here; none before the first start."""
        if not isinstance(self._pcontext, SubprocessContext):
            return {}
        handlers = self._pcontext.subprocess_handlers
        workers = self._worker_group.workers
        return {each.global_rank: handlers[each.local_rank].proc for each in workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """No restart after a mistake; one that does not count after a requeue."""
        codes = self.codes()
        if any(codes.values()):
            self._await_end(self._grace_s if all(map(is_stop, codes.values())) else NOTICE_S)
            self._shutdown()
            self._count_restart(*first_cause(self.codes()))
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _count_restart(self, rank: int, code: int) -> None:
        """Set the number of restarts that are left, and report one that follows."""
        total = self._worker_group.spec.max_restarts
        if self._policy.others_go_on and meaning_of(code) == Requeued.exit_code:
            self._remaining_restarts += 1
            self._say("another host was told to end; starting again, to go on when it is back")
        elif is_final(code):
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            number = total - self._remaining_restarts + 1
            self._say(f"{describe(rank, code)}: starting again ({number} of {total})")

    def _await_end(self, limit_s: float) -> None:
        """Let the other ranks end by themselves: they print why, or save."""
        deadline = time.monotonic() + limit_s
        while len(self.codes()) < len(self.processes()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None
    ) -> None:
        """End the ranks: they save first. Further signals go to them, too."""
        began = time.monotonic()
        if death_sig == signal.SIGTERM and self._policy.others_go_on:
            death_sig = signal.SIGUSR1
        try:
            super()._shutdown(death_sig, self._grace_s)  # type: ignore[arg-type]  # any number
        except SignalException as again:
            if again.sigval == signal.SIGINT and time.monotonic() - began > IMPATIENT_S:
                self._grace_s = KILL_S
            self._shutdown(again.sigval)


class KnownMeetingPoint(StaticTCPRendezvous):
    """Ranks that meet at an address that all agents know, so that no agent needs a store."""

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """The place of this agent; with port 0 the ranks meet at another free port each time."""
        point = RendezvousStoreInfo(self.master_addr, self.master_port or free_port())
        return RendezvousInfo(HashStore(), self.rank, self.world_size, point)


def on_loopback() -> KnownMeetingPoint:
    """Where the ranks of one machine meet: on loopback."""
    return KnownMeetingPoint("127.0.0.1", 0, 0, 1, _RUN, 0)


def in_pod(env: MutableMapping[str, str]) -> tuple[int, KnownMeetingPoint]:
    """The number of ranks of a pod, and where all pods' ranks meet, by an operator's variables.

    The variables are removed, since ranks use others. InputError if one is missing or no number.
    """
    texts = {}
    for name in (*_NUMBERS, _ADDRESS):
        if name not in env:
            raise InputError(
                "launch.agent-outside-pod",
                "{name} is not set: `launch agent` is what `launch kubernetes` starts in every "
                "pod; on one machine use `launch local`",
                name=name,
            )
        texts[name] = env.pop(name)
    env["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # pods have as many ranks each: no agent asks
    node, num_nodes, ranks, port = (parse_int(name, texts[name]) for name in _NUMBERS)
    return ranks, KnownMeetingPoint(texts[_ADDRESS], port, node, num_nodes, _RUN, 0)


def run_ranks(
    command: Sequence[str], ranks: int, meeting: RendezvousHandler, policy: Policy, *, say: Say
) -> int:
    """Run so many ranks until the run is over. Returns the exit code of the first that failed.

    Signals that end a run are passed on to the ranks, which save a checkpoint first. TrainyardError
    if a rank was killed, or could not save after a signal.
    """
    for name in _LOGGERS:  # the ranks print what went wrong: the agent's tables would bury it
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        rdzv_handler=meeting,
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=policy.restarts,
        monitor_interval=_MONITOR_S,
    )
    agent = Agent(spec, policy, say)
    # nohup ignores SIGHUP; it must stay ignored, and torch's agent would handle it.
    names = [each.name for each in STOPS if signal.getsignal(each) != signal.SIG_IGN]
    with (
        _set(TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(names), **_VARIABLES),
        handling(STOPS, _raise),
        handling((signal.SIGTSTP,), lambda number, frame: _pause(agent.processes().values())),
    ):
        try:
            agent.run()
        except SignalException as error:
            agent._shutdown(error.sigval)  # in case that torch's own try was cut short
            if policy.others_go_on and error.sigval == signal.SIGTERM:
                return _code_of_leaving(agent.codes(), say)
            return code_after(error.sigval, agent.codes())
        except RendezvousError as error:
            raise _end_of(error) from None
        meeting.shutdown()  # the run is over: agents that would start again end too
    rank, code = first_cause(agent.codes())
    if code < 0 and not is_stop(code):
        raise ending_with(code, killed(rank, -code))
    return meaning_of(code)


@contextmanager
def _set(**variables: str) -> Iterator[None]:
    """Inside, these environment variables are set, for torch's agent and the ranks."""
    before = dict(os.environ)
    os.environ.update(variables, **{LAUNCHER: str(os.getpid())})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _code_of_leaving(codes: dict[int, int], say: Say) -> int:
    """LEFT, unless the run is over: a host that comes back goes on from the last checkpoint."""
    rank, code = first_cause(codes) if codes else (0, -signal.SIGTERM)
    if code in OVER:
        return code
    if not is_stop(code):
        say(f"told to end, but not saved: {describe(rank, code)}")
    return LEFT


def _end_of(error: RendezvousError) -> TrainyardError:
    if isinstance(error, RendezvousTimeoutError):
        return TrainyardError("launch.too-few-hosts", "too few hosts came to go on with")
    if isinstance(error, RendezvousClosedError | RendezvousGracefulExitError):
        return TrainyardError(
            "launch.ended-elsewhere", "another host has ended the run; its output says why"
        )
    return TrainyardError(
        "launch.store-gone", "the store at the first host is gone: give the command again"
    )


def _raise(number: int, frame: FrameType | None) -> None:
    if not is_postponed(number, frame):
        raise SignalException(f"signal {number}", sigval=signal.Signals(number))


def _pause(processes: "Collection[subprocess.Popen[Any]]") -> None:
    """On Ctrl-Z: stop the ranks, which have sessions of their own, and this process, until `fg`."""
    # This process may be killed while it is stopped: its ranks then continue, save and end.
    pids = [str(process.pid) for process in processes if process.poll() is None]
    with subprocess.Popen(
        ["/bin/sh", "-c", 'read at_end_of_file; kill -CONT "$@"', "sh", *pids],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ):
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        signal.raise_signal(signal.SIGSTOP)
