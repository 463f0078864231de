"""`trainyard launch agent`: the ranks of one pod; `launch kubernetes` has every pod run it.

torchrun ends with 1 for every failure of its ranks, so an operator could not tell a pod that must
come back from one that must not:

0      the run is over
1      failed as often as was allowed, or stopped by hand: the job is over
2, 3   a mistake in the input; diverged: the job is over
143    told to end (SIGTERM), as when its node is drained: the pod comes back, and resumes
"""

import argparse
import os
import shlex

from trainyard.commands.launching import add_job_options, add_restarts, job_of
from trainyard.commands.numbers import positive
from trainyard.data.storage.credentials import without_secrets
from trainyard.errors import TrainyardError
from trainyard.launch.exit_codes import GRACE_S
from trainyard.printable import print_line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch agent` to its parser."""
    add_job_options(parser)
    add_restarts(parser)
    add_grace(parser)
    parser.set_defaults(run_command=launch)


def add_grace(parser: argparse.ArgumentParser) -> None:
    """Add the option --grace to a parser."""
    parser.add_argument(
        "--grace",
        type=positive,
        default=GRACE_S,
        metavar="S",
        help=f"seconds for the ranks to save when the pod is to end ({GRACE_S} if not given)",
    )


def launch(options: argparse.Namespace) -> int:
    """Run `trainyard launch agent`; returns the exit code."""
    job = job_of(options)
    if options.dry_run:
        print(without_secrets(shlex.join(job.command)))
        return 0
    from trainyard.launch.agent import LEFT, OVER, Policy, in_pod, run_ranks

    ranks, meeting = in_pod(os.environ)
    policy = Policy(restarts=options.restarts, grace_s=options.grace, others_go_on=True)
    try:
        code = run_ranks(job.command, ranks, meeting, policy, say=print_line)
    except TrainyardError as error:
        error.exit_code = TrainyardError.exit_code
        raise
    return code if code in (*OVER, LEFT) else TrainyardError.exit_code
