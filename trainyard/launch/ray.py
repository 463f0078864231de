"""Ranks on a Ray cluster: an actor on each node starts them."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainyard.errors import InputError
from trainyard.launch.attempts import Policy, supervise
from trainyard.launch.events import Events, passing_signals
from trainyard.launch.job import Job
from trainyard.launch.output import Printer
from trainyard.launch.ray_cluster import RayOptions, placed

_CONNECT_S = 10
_STORE_BYTES = 100_000_000  # the store stays empty; Ray's minimum is about 80 MB


def launch_ray(job: Job, options: RayOptions, policy: Policy, say: Callable[[str], None]) -> int:
    """Run a job on nodes of Ray. Returns the exit code of the run.

    InputError if there is no such cluster, or it has too few resources.
    """
    events = Events()
    with (
        _connected(options),
        passing_signals(events),
        placed(job.command, options, events, say) as cluster,
    ):
        printer = Printer(list(cluster.hosts), as_they_are=options.is_json)
        return supervise(cluster, events, policy, show=printer.line, say=say)


@contextmanager
def _connected(options: RayOptions) -> Iterator[None]:
    """Connects to a cluster. A cluster started here is shut down at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a warning
    try:
        import ray
    except ImportError:
        raise InputError("this needs Ray: pip install 'trainyard[ray]'") from None

    given = options.address or os.environ.get("RAY_ADDRESS")
    address = given or "auto"
    _check_answer(address)
    try:
        try:
            _join(address, options)
        except ConnectionError:
            if given:
                raise
            _join("local", options)
        yield
    except (ConnectionError, RuntimeError, ValueError) as error:
        if ray.is_initialized():
            raise
        first_line = str(error).strip().partition("\n")[0]  # for instance of a version mismatch
        raise InputError(f"Ray at {address}: {first_line}") from None
    finally:
        ray.shutdown()


def _check_answer(address: str) -> None:
    """InputError at once if nothing answers; Ray itself tries for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise InputError(
            f"no Ray answers at {address} ({error.strerror or error}): give the address of its "
            "head, with the port that `ray start --head` was given, 6379 if none"
        ) from None


def _join(address: str, options: RayOptions) -> None:
    import ray

    more: dict[str, Any] = {}
    if address == "local":
        cores = len(os.sched_getaffinity(0))
        more = {
            "num_cpus": max(cores, (options.ranks or options.gpus or 1) * options.cpus),
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    environment = dict(options.environment)
    ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env=environment, **more)
