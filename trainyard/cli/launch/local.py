"""`trainyard launch local`."""

import argparse
import os
import sys

from trainyard.cli.launch.common import (
    add_job_options,
    add_restarts,
    job_of,
    num_devices,
    print_command,
)
from trainyard.printable import how_many, print_line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch local` to its parser."""
    add_job_options(parser, ranks="processes (one per GPU, or 1)")
    add_restarts(parser)
    parser.set_defaults(run_command=launch)


def launch(options: argparse.Namespace) -> int:
    """Run `trainyard launch local`; returns the exit code."""
    job = job_of(options)
    if options.dry_run:
        print_command(job.command, f"{options.ranks or '(one per GPU, or 1)'} x ")
        return 0
    from trainyard.launch import agent

    ranks = options.ranks or num_devices()
    if ranks > num_devices():
        _hide_gpus(ranks)
    if sys.stderr.isatty() and not options.quiet:
        print_line(f"starting {how_many(ranks, 'rank')}, which load torch")
    policy = agent.Policy(restarts=options.restarts)
    return agent.run_ranks(job.command, ranks, agent.here(), policy, say=print_line)


def _hide_gpus(ranks: int) -> None:
    """Hide the GPUs if there are fewer than ranks: NCCL needs one for each, so all use the CPU."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks inherit this variable
        print_line(
            f"{ranks} ranks are more than this machine has GPUs ({gpus}), and each would need one "
            "of its own: all train on the CPU; leave --ranks out to train on GPUs"
        )
