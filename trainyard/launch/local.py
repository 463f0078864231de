"""Several ranks on this machine, through torchrun's own elastic agent."""

import logging
import os
import signal
import sys

from trainyard.errors import Requeued, Stopped, TrainyardError

_GRACE_S = 300  # for the ranks to save a checkpoint after a signal, before they are killed
_REQUEUE = (signal.SIGUSR1, signal.SIGUSR2)


def launch_local(arguments: list[str], *, ranks: int) -> int:
    """Run `trainyard ARGUMENTS` as `ranks` processes; the exit code of the first that failed.

    Signals that end a run are passed on to the ranks, which save a checkpoint first.
    """
    # The agent hands this process's stop to the ranks and waits for them this long.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_GRACE_S))
    from torch.distributed.elastic.multiprocessing.api import SignalException
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
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trainyard", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        raise _killed(rank, -failure.exitcode) from None
    except SignalException as error:
        return Requeued.exit_code if error.sigval in _REQUEUE else Stopped.exit_code
    return 0


def _killed(rank: int, number: int) -> TrainyardError:
    """A rank that could not say anything itself."""
    cause = "; signal 9 without your doing usually means that memory ran out" * (number == 9)
    error = TrainyardError(f"rank {rank} was killed by signal {number}{cause}")
    error.exit_code = 128 + number  # as a shell has it
    return error
