"""`trainyard launch local`: ranks on this machine."""

import argparse
import os
import sys

from trainyard.launch.job import Job, shown
from trainyard.launch.launcher import Launcher, add_ranks, add_restarts, num_gpus, ranks_here
from trainyard.printable import how_many, print_line


class Local(Launcher):
    summary = "several ranks on this machine"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        where = parser.add_argument_group("where to train")
        add_ranks(where, "this machine")
        add_restarts(where)

    def is_here(self, options: argparse.Namespace) -> bool:
        return True

    def plan(self, job: Job, options: argparse.Namespace) -> str:
        ranks = options.ranks or options.gpus or "(one per GPU, or 1)"
        return f"{ranks} x {shown(job.command)}\n"

    def run(self, job: Job, options: argparse.Namespace) -> int:
        from trainyard.launch import elastic

        ranks, gpus = ranks_here(options), num_gpus()
        if 0 < gpus < ranks:  # NCCL needs one for each
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks inherit this variable
            print_line(
                f"{ranks} ranks are more than this machine has GPUs ({gpus}), and each would need "
                "one of its own: all train on the CPU; leave --ranks out to train on GPUs"
            )
        if sys.stderr.isatty() and not options.quiet:
            print_line(f"starting {how_many(ranks, 'rank')}, which load torch")
        policy = elastic.Policy(restarts=options.restarts)
        return elastic.run_ranks(job.command, ranks, elastic.on_loopback(), policy, say=print_line)
