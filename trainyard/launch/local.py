"""Several ranks on this machine, through torchrun's elastic agent."""

import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from trainyard.launch.events import handling
from trainyard.launch.exit_codes import GRACE_S, describe, first_cause
from trainyard.launch.ranks import Job
from trainyard.launch.supervisor import Ending, Say, code_after, with_restarts
from trainyard.parent import LAUNCHER

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")


def launch_local(job: Job, *, ranks: int, restarts: int, say: Say) -> int:
    """Run a job as `ranks` processes. Returns the exit code of the first that failed.

    After a failure that may not recur, all ranks are restarted, up to `restarts` times, with a
    message to `say`. Signals that end a run are passed on to the ranks, which save a checkpoint
    first. TrainyardError if a signal killed the first rank that failed.
    """
    # The agent passes a stop of this process on to the ranks and waits this long for them.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    # The agent's own store for the ranks would listen on all interfaces.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    # The same limit for the other ranks when one has died; torch has 30 s and no option for it.
    PContext.close.__defaults__ = (None, GRACE_S)
    # nohup ignores SIGHUP; it must stay ignored, and torch's agent would handle it.
    signals = [
        name for name in _SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN
    ]
    os.environ[LAUNCHER] = str(os.getpid())
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _noting(processes), handling((signal.SIGTSTP,), lambda *_: _pause(processes)):
            return with_restarts(lambda: _attempt(job, ranks, signals), restarts, say)
    except SignalException as error:
        codes = [process.poll() for process in processes]
        # None: a rank that a further Ctrl-C has left behind.
        known = {rank: 1 if code is None else code for rank, code in enumerate(codes)}
        return code_after(error.sigval, known)
    finally:
        del os.environ[LAUNCHER]  # for the ranks alone, not for later work of this process


@contextmanager
def _noting(processes: "list[subprocess.Popen[bytes]]") -> Iterator[None]:
    """Inside, the list has the processes of the ranks, which torch's agent keeps to itself."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    start = SubprocessContext.start

    def noted(self: SubprocessContext) -> None:
        start(self)
        processes[:] = [each.proc for each in self.subprocess_handlers.values()]

    SubprocessContext.start = noted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        SubprocessContext.start = start  # type: ignore[method-assign]


def _pause(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
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


def _attempt(job: Job, ranks: int, signals: Sequence[str]) -> Ending:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The ranks print what went wrong: the agent's tables would bury it.
    for name in ("agent.server.api", "multiprocessing.api", "agent.server.local_elastic_agent"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    with TemporaryDirectory(prefix="trainyard-launch-") as folder, _handlers_kept(signals):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else a folder in /tmp is left over
            run_id="trainyard",
            # A file of this user, as the agent unpickles what it reads there.
            rdzv_backend="c10d",
            rdzv_endpoint=os.path.join(folder, "rendezvous"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",  # where rank 0 serves the store of the ranks
            max_restarts=0,  # the agent's own restarts would also follow a mistake of the user
            monitor_interval=0.1,
            signals_to_handle=",".join(signals),
        )
        try:
            elastic_launch(config, job.command[0])(*job.command[1:])
        except ChildFailedError as error:
            rank, code = first_cause({rank: end.exitcode for rank, end in error.failures.items()})
            return Ending(code, describe(rank, code))
    return Ending(0)


@contextmanager
def _handlers_kept(names: Sequence[str]) -> Iterator[None]:
    """Restores signal handlers: the agent leaves its own, which would catch later signals."""
    before = {name: signal.getsignal(signal.Signals[name]) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)
