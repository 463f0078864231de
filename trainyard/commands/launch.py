"""`trainyard launch`: starts one recipe on several ranks; each launcher has a launch_*.py."""

import argparse

from trainyard.commands import (
    launch_agent,
    launch_kubernetes,
    launch_local,
    launch_mpi,
    launch_ray,
    launch_slurm,
    launch_ssh,
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch` to its parser."""
    subparsers = parser.add_subparsers(dest="launcher", required=True, metavar="LAUNCHER")
    for name, module, about in (
        ("local", launch_local, "several ranks on this machine"),
        ("slurm", launch_slurm, "a batch job of Slurm's, on one node or many"),
        ("ssh", launch_ssh, "hosts that you can log in to"),
        ("mpi", launch_mpi, "OpenMPI's mpirun, on this machine or several hosts"),
        ("ray", launch_ray, "a Ray cluster, or one started on this machine"),
        ("kubernetes", launch_kubernetes, "pods, by Kubeflow's Trainer"),
        ("agent", launch_agent, "the ranks of one pod; what `kubernetes` has every pod run"),
    ):
        module.add(subparsers.add_parser(name, help=about))
