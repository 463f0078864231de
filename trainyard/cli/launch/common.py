"""Options and checks shared by all launchers."""

import argparse
import shlex
from collections.abc import Iterable

from trainyard.cli.options import loading, positive, whole
from trainyard.cli.train import (
    OUTPUT_MODES,
    add_training_options,
    check_recipe,
    config_of,
    run_folder,
)
from trainyard.data.storage.credentials import check_url, without_secrets
from trainyard.data.storage.source import is_remote
from trainyard.errors import InputError
from trainyard.launch.job import Job

_WAIT_S = 300


def add_job_options(
    parser: argparse.ArgumentParser, *, ranks: str | None = None, each: str | None = None
) -> None:
    """Add the options of `train`, --dry-run and --doctor.

    `ranks`: help of --ranks. `each`: "host" or "node", adds --ranks and --gpus per host or node.
    """
    add_training_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be started")
    parser.add_argument(
        "--doctor", action="store_true", help="examine the machines in place of training"
    )
    if each is not None:
        ranks = f"processes per {each} (one per GPU, or 1)"
        about = f"per {each}, with a rank for each"
        parser.add_argument("--gpus", type=positive, metavar="N", help=about)
    if ranks is not None:
        parser.add_argument("--ranks", type=positive, metavar="N", help=ranks)


def add_restarts(parser: argparse.ArgumentParser, default: int = 0) -> None:
    """Add the option --restarts to a parser."""
    parser.add_argument(
        "--restarts",
        type=whole,
        default=default,
        metavar="N",
        help="how often all ranks are started again, and go on, after one has died "
        f"({default} if not given)",
    )


def add_wait(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option --wait, in seconds, to a parser."""
    parser.add_argument(
        "--wait",
        type=whole,
        default=_WAIT_S,
        metavar="SECONDS",
        help=f"for {what} ({_WAIT_S} if not given)",
    )


def job_of(
    options: argparse.Namespace, *, is_here: bool = True, recipe_there: str | None = None
) -> Job:
    """The command of every rank. Mistakes in options or the recipe raise before anything starts.

    `is_here`: ranks run on this machine, so the data is checked too. `recipe_there`: the recipe's
    path on the ranks, if it differs from the path here.
    """
    from trainyard.config import load_recipe

    if getattr(options, "gpus", None) and getattr(options, "ranks", None):
        raise InputError("launch.gpus-and-ranks")
    if is_here:
        config_of(options)
    else:
        check_recipe(options)
        load_recipe(options.recipe, options.overrides)
    run = run_folder(options)
    if options.doctor:
        options.restarts = 0  # a restart would find the same problems
    arguments = ["doctor" if options.doctor else "train", recipe_there or options.recipe]
    arguments += ["--run", str(run)]
    arguments += [word for location in options.data or () for word in ("--data", location)]
    arguments += ["--json"] if options.json else []
    arguments += _output_flags(options)
    arguments += [f"--{key}={text}" for key, text in options.overrides.items()]
    return Job(tuple(arguments), run)


def print_command(words: Iterable[str], before: str = "") -> None:
    """Print the command line that --dry-run shows, without secrets; `before` says where it runs."""
    print(f"{before}{without_secrets(shlex.join(words))}")


def check_writable(job: Job, file: str) -> None:
    """InputError if a job's command, which is written into `file`, has a signature.

    The message shows the word without it.
    """
    for word in job.arguments:
        if is_remote(word) and not word.startswith("--"):
            check_url(word)
        if without_secrets(word) != word:
            raise InputError("launch.signature-written", value=without_secrets(word), name=file)


def _output_flags(options: argparse.Namespace) -> list[str]:
    """Output options for the ranks; none for `doctor`, which does not have them."""
    given = [name for name in OUTPUT_MODES if getattr(options, name.replace("-", "_"))]
    return [] if options.doctor else [f"--{name}" for name in given]


def num_devices(least: int = 1) -> int:
    """Default number of ranks on this machine: one per GPU, or `least`."""
    with loading():
        import torch

    return max(torch.cuda.device_count(), least)
