"""`trainyard launch agent`: the ranks of a pod, of a host of `launch ssh`, or of a node of Ray.

torchrun ends with 1 for every failure of its ranks, so an operator could not tell a pod that must
come back from one that must not:

0      the run is over
1      failed as often as was allowed, or stopped by hand: the job is over
2, 3   a mistake in the input; diverged: the job is over
143    told to end (SIGTERM), as when its node is drained: the pod comes back, and resumes
"""

import argparse
import fcntl
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from trainyard.errors import TrainyardError
from trainyard.files import open_own
from trainyard.launch.exit_codes import LEFT, OVER
from trainyard.launch.job import Job, shown
from trainyard.launch.launcher import (
    Launcher,
    add_grace,
    add_ranks,
    add_restarts,
    add_wait,
    ranks_here,
)
from trainyard.parent import end_with_launcher
from trainyard.printable import print_line

if TYPE_CHECKING:
    from trainyard.launch.elastic import Policy


class Agent(Launcher):
    summary = ""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_ranks(parser, "this host")
        add_restarts(parser)
        add_grace(parser)
        add_wait(parser, "enough hosts")
        add = parser.add_argument
        add("--hosts", metavar="MIN:MAX", help="a host of `launch ssh`, not a pod")
        add("--ray", action="store_true", help="a node of `launch ray`, not a pod")
        add("--run-id", metavar="ID-NUMBER", help="of the start, and of this host")
        add("--listen", metavar="ADDRESS", help="the first host: of the store")

    def is_here(self, options: argparse.Namespace) -> bool:
        return True

    def plan(self, job: Job, options: argparse.Namespace) -> str:
        return f"{shown(job.command)}\n"

    def run(self, job: Job, options: argparse.Namespace) -> int:
        if options.ray:
            return _node(job)
        return _host(job, options) if options.hosts else _pod(job, options)


def _node(job: Job) -> int:
    end_with_launcher()
    from trainyard.launch.elastic import Policy, in_pod, run_ranks

    ranks, meeting = in_pod(os.environ)
    return run_ranks(job.command, ranks, meeting, Policy(), say=print_line)


def _pod(job: Job, options: argparse.Namespace) -> int:
    from trainyard.launch.elastic import in_pod, run_ranks

    ranks, meeting = in_pod(os.environ)
    try:
        code = run_ranks(job.command, ranks, meeting, _policy(options), say=print_line)
    except TrainyardError as error:
        error.exit_code = TrainyardError.exit_code
        raise
    return code if code in (*OVER, LEFT) else TrainyardError.exit_code


def _policy(options: argparse.Namespace) -> "Policy":
    from trainyard.launch.elastic import Policy

    return Policy(restarts=options.restarts, grace_s=options.grace, others_go_on=True)


def _host(job: Job, options: argparse.Namespace) -> int:
    from trainyard.launch.joining import listen, rendezvous
    from trainyard.launch.ssh import READY

    orders = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the orders are not for ranks to read
    first, server = listen(options.listen or None) if options.listen is not None else ("", None)
    endpoint_here = f"{first}:{server.getsockname()[1]}" if server else ""
    print(f"{READY}{endpoint_here}", flush=True)
    ranks = ranks_here(options)
    settings = json.loads(orders.readline() or "{}")
    os.environ.update(settings.get("variables", {}), PYTHONUNBUFFERED="1", FORCE_COLOR="")
    fewest, largest = map(int, options.hosts.split(":"))
    with _alone(options.run_id):
        threading.Thread(target=_obey, args=(orders,), daemon=True).start()
        run, _, _ = options.run_id.rpartition("-")
        endpoint = endpoint_here or settings.get("endpoint", "")
        meeting = rendezvous(endpoint, (fewest, largest), run, server=server, wait_s=options.wait_s)
        from trainyard.launch.elastic import run_ranks

        return run_ranks(job.command, ranks, meeting, _policy(options), say=print_line)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Inside, this is the host's only agent of a start.

    ssh may have lost a host whose agent goes on: the next one then waits for its end.
    """
    path = os.path.join(tempfile.gettempdir(), f"trainyard-agent-{name}")
    with open(path, "w", opener=open_own) as file:  # others may put a link there
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.unlink(path)


def _obey(orders: TextIO) -> None:
    """Take signals from the launcher, a number on a line. If it is gone, this host leaves."""
    for line in orders:
        os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)
