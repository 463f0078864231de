"""`trainyard launch pod`, which `trainyard launch kubernetes` runs in every pod."""

import argparse
import os
import shlex
import sys

from trainyard.commands.launching import add_job_options, add_restarts, job_of
from trainyard.commands.numbers import positive
from trainyard.data.storage.credentials import without_secrets
from trainyard.launch.exit_codes import GRACE_S
from trainyard.launch.ranks import Line
from trainyard.printable import print_line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch pod` to its parser."""
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
    """Run `trainyard launch pod`; returns the exit code."""
    from trainyard.launch.output import take_any_text
    from trainyard.launch.pod import launch_pod, pod_share

    job = job_of(options)
    share = pod_share(job, os.environ)
    if options.dry_run:
        print(f"{share.count} x {without_secrets(shlex.join(job.command))}")
        return 0
    take_any_text()
    return launch_pod(
        share,
        restarts=options.restarts,
        grace_s=options.grace,
        show=_show,
        say=print_line,
    )


def _show(line: Line) -> None:
    print(line.text, file=sys.stderr if line.is_error else sys.stdout, flush=True)
