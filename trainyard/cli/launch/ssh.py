"""`trainyard launch ssh`."""

import argparse
import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from trainyard.cli.launch.common import (
    add_job_options,
    add_restarts,
    add_wait,
    job_of,
    print_command,
)
from trainyard.cli.options import positive
from trainyard.printable import how_many, print_line

if TYPE_CHECKING:
    from trainyard.launch.ssh import SshOptions


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch ssh` to its parser."""
    add_job_options(parser, each="host")
    parser.add_argument(
        "--hosts",
        required=True,
        metavar="A,B:4|FILE",
        help="names that ssh knows, user@a, a:4 for 4 ranks, or a file of these with one a line",
    )
    parser.add_argument("--folder", metavar="DIR", help="working directory there (as this one)")
    parser.add_argument("--python", metavar="PATH", help="the Python there (at this one's path)")
    parser.add_argument("--ssh", metavar="COMMAND", default="ssh", help="such as 'ssh -p 2222'")
    parser.add_argument("--ssh-config", metavar="FILE", help="in place of ~/.ssh/config")
    parser.add_argument(
        "--master-addr", metavar="ADDRESS", help="of the first host, for the others"
    )
    parser.add_argument(
        "--sync", action="store_true", help="copy this directory there first, by rsync"
    )
    parser.add_argument(
        "--min-hosts",
        type=positive,
        metavar="N",
        help="go on without hosts that are gone, after a restart",
    )
    add_restarts(parser)
    add_wait(parser, "a host to come back, before a restart")
    parser.set_defaults(run_command=launch)


def launch(options: argparse.Namespace) -> int:
    """Run `trainyard launch ssh`; returns the exit code."""
    from trainyard.launch.ssh import agent_command, launch_ssh, sync

    job, ssh = job_of(options, is_here=False), _options(options)
    job = replace(job, python=ssh.login.python)
    if options.dry_run:
        for number in range(len(ssh.hosts)):
            print_command(agent_command(job, ssh, number, "RUN"))
        return 0
    if options.sync:
        print_line(f"copying this directory to {how_many(len(ssh.hosts), 'host')}")
        sync(ssh.hosts, ssh.login)
    return launch_ssh(job, ssh, print_line)


def _options(options: argparse.Namespace) -> "SshOptions":
    from trainyard.errors import InputError
    from trainyard.launch.hosts import read_hosts
    from trainyard.launch.job import Job
    from trainyard.launch.ssh import Login, SshOptions

    if options.min_hosts and not options.restarts:
        raise InputError("launch.min-hosts-without-restarts")
    config = ("-F", options.ssh_config) if options.ssh_config else ()
    return SshOptions(
        hosts=read_hosts(options.hosts),
        login=Login(
            ssh=(*shlex.split(options.ssh), *config),
            folder=options.folder or os.getcwd(),
            python=options.python or Job.python,
        ),
        restarts=options.restarts,
        min_hosts=options.min_hosts,
        ranks=options.ranks,
        gpus=options.gpus,
        master_addr=options.master_addr,
        wait_s=options.wait,
        is_json=options.json,
    )
