"""`trainyard launch`: starts one recipe on several ranks; a module each."""

import argparse

from trainyard.cli.launch import (
    agent,
    kubernetes,
    local,
    mpi,
    ray,
    slurm,
    ssh,
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch` to its parser."""
    subparsers = parser.add_subparsers(dest="launcher", required=True, metavar="LAUNCHER")
    for name, module, about in (
        ("local", local, "several ranks on this machine"),
        ("slurm", slurm, "a batch job of Slurm's, on one node or many"),
        ("ssh", ssh, "hosts that you can log in to"),
        ("mpi", mpi, "OpenMPI's mpirun, on this machine or several hosts"),
        ("ray", ray, "a Ray cluster, or one started on this machine"),
        ("kubernetes", kubernetes, "pods, by Kubeflow's Trainer"),
        ("agent", agent, "the ranks of one pod; what `kubernetes` has every pod run"),
    ):
        module.add(subparsers.add_parser(name, help=about))
