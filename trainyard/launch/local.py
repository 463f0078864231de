"""Several ranks on this machine, through torchrun's own elastic agent."""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trainyard.errors import Requeued, Stopped, TrainyardError
from trainyard.launch.ends import (
    GRACE_S,
    REQUEUE_SIGNALS,
    described,
    first_cause,
    is_last,
    shell_code,
)
from trainyard.launch.job import Job
from trainyard.parent import LAUNCHER

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def launch_local(job: Job, *, ranks: int, restarts: int, say: Callable[[str], None]) -> int:
    """Run a job as `ranks` processes; the exit code of the first that failed.

    After a failure that need not come again all ranks are started again, up to `restarts` times,
    and `say` is told. Signals that end a run are passed on to the ranks, which save a checkpoint
    first.
    """
    # The agent hands this process's stop to the ranks and waits for them this long.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    # As long, when a rank has died, for the others; torch has 30 s and no option for it.
    PContext.close.__defaults__ = (None, GRACE_S)
    # Under nohup one is ignored, and is to stay so; torch's agent would take it.
    signals = [
        name for name in _SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN
    ]
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        rank, code = _run(job, ranks, signals)
        for again in range(restarts):
            if is_last(code):
                break
            say(f"{described(rank, code)}: starting again ({again + 1} of {restarts})")
            rank, code = _run(job, ranks, signals)
    except SignalException as error:
        return Requeued.exit_code if error.sigval in REQUEUE_SIGNALS else Stopped.exit_code
    finally:
        del os.environ[LAUNCHER]  # of the ranks, not of what this process does later
    if code < 0:
        killed = TrainyardError(described(rank, code))
        killed.exit_code = shell_code(code)
        raise killed
    return code


def _run(job: Job, ranks: int, signals: Sequence[str]) -> tuple[int, int]:
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
        signals_to_handle=",".join(signals),
    )
    try:
        with _handlers_kept(signals):
            elastic_launch(config, job.command[0])(*job.command[1:])
    except ChildFailedError as error:
        return first_cause({rank: end.exitcode for rank, end in error.failures.items()})
    return 0, 0


@contextmanager
def _handlers_kept(names: Sequence[str]) -> Iterator[None]:
    """The agent leaves its own in place, which would take what is meant for this process later."""
    before = {name: signal.getsignal(signal.Signals[name]) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)
