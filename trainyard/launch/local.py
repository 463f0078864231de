"""Several ranks on this machine, through torchrun's own elastic agent."""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable

from trainyard.errors import DivergedError, InputError, PeerError, Requeued, Stopped, TrainyardError

_GRACE_S = 300  # for the ranks to save a checkpoint after a signal, before they are killed
_REQUEUE = (signal.SIGUSR1, signal.SIGUSR2)
# Exit codes after which it is of no use to start again, or not wanted.
_LAST = (
    *(0, InputError.exit_code, DivergedError.exit_code, Stopped.exit_code, Requeued.exit_code),
    *(-signal.SIGTERM, -signal.SIGINT),
)
# Those of ranks that end because another did: by its loss, and by the agent's signal.
_FOLLOW = (PeerError.exit_code, -signal.SIGTERM)
_LAUNCHER = "TRAINYARD_LAUNCHER"  # tells the ranks which process started them
_PR_SET_PDEATHSIG = 1  # see prctl(2)


def launch_local(
    arguments: list[str], *, ranks: int, restarts: int, say: Callable[[str], None]
) -> int:
    """Run `trainyard ARGUMENTS` as `ranks` processes; the exit code of the first that failed.

    After a failure that need not come again all ranks are started again, up to `restarts` times,
    and `say` is told. Signals that end a run are passed on to the ranks, which save a checkpoint
    first.
    """
    # The agent hands this process's stop to the ranks and waits for them this long.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_GRACE_S))
    os.environ[_LAUNCHER] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    # As long, when a rank has died, for the others; torch has 30 s and no option for it.
    PContext.close.__defaults__ = (None, _GRACE_S)
    try:
        rank, code = _run(arguments, ranks)
        for again in range(restarts):
            if code in _LAST:
                break
            say(f"{_how(rank, code)}: starting again ({again + 1} of {restarts})")
            rank, code = _run(arguments, ranks)
    except SignalException as error:
        return Requeued.exit_code if error.sigval in _REQUEUE else Stopped.exit_code
    if code < 0:
        killed = TrainyardError(_how(rank, code))
        killed.exit_code = 128 - code  # as a shell has it
        raise killed
    return code


def _run(arguments: list[str], ranks: int) -> tuple[int, int]:
    """The rank that ended it, and how: its exit code, or minus the signal that killed it."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The ranks say what went wrong: the agent's own tables would bury it.
    for name in ("agent.server.api", "multiprocessing.api", "agent.server.local_elastic_agent"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="trainyard",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,  # the agent's own would come after a mistake of the user's too
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trainyard", *arguments)
    except ChildFailedError as error:
        # Those that fail because another does, or that the agent ends for it, come last.
        ends = [(failure.exitcode, rank) for rank, failure in error.failures.items()]
        code, rank = min(ends, key=lambda end: (end[0] in _FOLLOW, end[1]))
        return rank, code
    return 0, 0


def _how(rank: int, code: int) -> str:
    if code > 0:
        return f"rank {rank} has ended with exit code {code}"
    cause = "; signal 9 without your doing usually means that memory ran out" * (code == -9)
    return f"rank {rank} was killed by signal {-code}{cause}"


def end_with_launcher() -> None:
    """A rank of a launcher that is killed saves a checkpoint and ends too."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it was killed before
        os.kill(os.getpid(), signal.SIGTERM)
