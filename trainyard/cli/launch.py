"""`trainyard launch`: starts one recipe on several ranks."""

import argparse
from functools import partial
from typing import Any

from trainyard.cli.train import (
    OUTPUT_MODES,
    add_training_options,
    check_recipe,
    config_of,
    run_folder,
    take_run,
)
from trainyard.errors import InputError
from trainyard.launch.agent import Agent
from trainyard.launch.job import Job, job_of
from trainyard.launch.kubernetes import Kubernetes
from trainyard.launch.launcher import Launcher
from trainyard.launch.local import Local
from trainyard.launch.mpi import Mpi
from trainyard.launch.ray import Ray
from trainyard.launch.slurm import Slurm
from trainyard.launch.ssh import Ssh

LAUNCHERS: dict[str, Launcher] = {
    "local": Local(),
    "slurm": Slurm(),
    "ssh": Ssh(),
    "mpi": Mpi(),
    "ray": Ray(),
    "kubernetes": Kubernetes(),
    "agent": Agent(),
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch` to its parser."""
    subparsers = parser.add_subparsers(dest="launcher", required=True, metavar="LAUNCHER")
    for name, launcher in LAUNCHERS.items():
        listed: dict[str, Any] = {"help": launcher.summary} if launcher.summary else {}
        options_parser = subparsers.add_parser(name, **listed)
        add_training_options(options_parser)
        options_parser.add_argument(
            "--dry-run", action="store_true", help="print what would be started"
        )
        text = "examine the machines in place of training"
        options_parser.add_argument("--doctor", action="store_true", help=text)
        launcher.add_options(options_parser)
        options_parser.set_defaults(run_command=partial(launch, launcher))


def launch(launcher: Launcher, options: argparse.Namespace) -> int:
    """Run `trainyard launch LAUNCHER`; returns the exit code."""
    job = _job(launcher, options)
    if options.dry_run:
        print(launcher.plan(job, options), end="")
        return 0
    return launcher.run(job, options)


def _job(launcher: Launcher, options: argparse.Namespace) -> Job:
    """The command of every rank. Mistakes in options or the recipe raise before anything starts."""
    from trainyard.config import load_recipe

    take_run(options)
    if options.gpus and options.ranks:
        raise InputError(
            "launch.gpus-and-ranks", "--gpus and --ranks both set the number of ranks: drop one"
        )
    if launcher.is_here(options):
        config_of(options)
    else:
        check_recipe(options)
        load_recipe(options.recipe, options.overrides)
    if options.doctor:
        options.restarts = 0  # a restart would find the same problems
    flags = ("json",) if options.doctor else ("json", *OUTPUT_MODES)
    command = "doctor" if options.doctor else "train"
    return job_of(options, run_folder(options), flags, command=command)
