"""`trainyard launch pod`, which `trainyard launch kubernetes` runs in every pod."""

import argparse
import os
import shlex
import sys

from trainyard.commands.launching import add_job_options, add_restarts, job_of, say
from trainyard.commands.numbers import positive
from trainyard.data.storage.credentials import without_secrets
from trainyard.launch.ends import GRACE_S


def add(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser)
    add_restarts(parser)
    add_grace(parser)
    parser.set_defaults(run_command=launch)


def add_grace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace",
        type=positive,
        default=GRACE_S,
        metavar="S",
        help=f"seconds for the ranks to save when the pod is to end ({GRACE_S} if not given)",
    )


def launch(options: argparse.Namespace) -> int:
    from trainyard.launch.output import take_any_text
    from trainyard.launch.pod import launch_pod, place_in

    job, place = job_of(options), place_in(os.environ)
    if options.dry_run:
        print(f"{place.ranks} x {without_secrets(shlex.join(job.command))}")
        return 0
    take_any_text()
    return launch_pod(
        job,
        place,
        restarts=options.restarts,
        grace_s=options.grace,
        on_line=_pass_on,
        say=say,
    )


def _pass_on(rank: int, line: str, is_error: bool) -> None:
    print(line, file=sys.stderr if is_error else sys.stdout, flush=True)
