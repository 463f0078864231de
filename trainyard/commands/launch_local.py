"""`trainyard launch local`."""

import argparse
import shlex

from trainyard.commands.launching import add_job_options, add_restarts, job_of, num_devices, say


def add(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser, ranks="processes (one per GPU, or 1)")
    add_restarts(parser)
    parser.set_defaults(run_command=launch)


def launch(options: argparse.Namespace) -> int:
    job = job_of(options)
    if options.dry_run:
        ranks = options.ranks or "(one per GPU, or 1)"
        print(f"{ranks} x {shlex.join(job.command)}")
        return 0
    from trainyard.launch.local import launch_local

    ranks = options.ranks or num_devices()
    return launch_local(job, ranks=ranks, restarts=options.restarts, say=say)
