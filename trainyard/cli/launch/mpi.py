"""`trainyard launch mpi`."""

import argparse
import os
import shlex
import shutil
from typing import TYPE_CHECKING

from trainyard.cli.launch.common import (
    add_job_options,
    job_of,
    num_devices,
    print_command,
)

if TYPE_CHECKING:
    from trainyard.launch.mpi import MpiOptions


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch mpi` to its parser."""
    add_job_options(parser, each="host")
    parser.add_argument(
        "--hosts",
        metavar="A,B:4|FILE",
        help="a:4 for 4 ranks, or a file of these with one a line (this machine alone)",
    )
    parser.add_argument(
        "--mpirun", metavar="PATH", default="mpirun", help="OpenMPI's (the first on PATH)"
    )
    parser.add_argument(
        "--extra", metavar="WORDS", default="", help="for mpirun: '--mca btl_tcp_if_include eth0'"
    )
    parser.set_defaults(run_command=launch)


def launch(options: argparse.Namespace) -> int:
    """Run `trainyard launch mpi`; returns the exit code."""
    from trainyard.launch.mpi import command_line, launch_mpi, variables

    job, mpi = job_of(options, is_here=options.hosts is None), _options(options)
    if options.dry_run:
        settings = [f"{name}={value}" for name, value in variables(mpi).items()]
        print_command(["env", *settings, *command_line(job, mpi)])
        return 0
    return launch_mpi(job, mpi)


def _options(options: argparse.Namespace) -> "MpiOptions":
    from trainyard.errors import InputError
    from trainyard.launch.hosts import read_hosts
    from trainyard.launch.job import passed_on
    from trainyard.launch.mpi import MpiOptions

    hosts = read_hosts(options.hosts or "localhost")
    for host in hosts:
        if host.target != host.name:
            raise InputError("launch.user-for-mpirun", value=host.target, name=host.name)
    given = {host.name: host.slots for host in hosts}
    ranks = options.ranks or options.gpus
    if ranks is None and None in given.values():
        if options.hosts:  # other hosts may have other GPUs than this machine
            raise InputError("launch.no-ranks-per-host")
        ranks = num_devices()
    return MpiOptions(
        hosts={host: slots or ranks for host, slots in given.items()},
        mpirun=shutil.which(options.mpirun) or options.mpirun,
        extra=shlex.split(options.extra),
        is_root=os.geteuid() == 0,
        passed_on=sorted(passed_on(os.environ)) if list(given) != ["localhost"] else (),
    )
