"""What all launchers have in common on the command line, where an option has one name."""

import argparse
import sys
from contextlib import suppress

from trainyard.commands.numbers import positive, whole
from trainyard.commands.train import (
    VOICES,
    add_training_options,
    check_recipe,
    config_of,
    run_folder,
)
from trainyard.data.credentials import check_url, without_secrets
from trainyard.data.source import is_remote
from trainyard.errors import InputError
from trainyard.launch.job import Job
from trainyard.printable import printable

_WAIT_S = 300


def add_job_options(parser: argparse.ArgumentParser, *, ranks: str | None = None) -> None:
    """Everything that `train` takes, and --dry-run; `ranks`: what --ranks means, if it is one."""
    add_training_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be started")
    parser.add_argument(
        "--doctor", action="store_true", help="examine the machines in place of training"
    )
    if ranks is not None:
        parser.add_argument("--ranks", type=positive, metavar="N", help=ranks)


def add_restarts(parser: argparse.ArgumentParser, default: int = 0) -> None:
    parser.add_argument(
        "--restarts",
        type=whole,
        default=default,
        metavar="N",
        help="how often all ranks are started again, and go on, after one has died "
        f"({default} if not given)",
    )


def add_wait(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--wait",
        type=whole,
        default=_WAIT_S,
        metavar="SECONDS",
        help=f"for {what} ({_WAIT_S} if not given)",
    )


def check_ranks(options: argparse.Namespace) -> None:
    """InputError for two numbers where there can be one."""
    if options.gpus and options.ranks:
        raise InputError("--gpus and --ranks both say how many ranks: give one of them")


def job_of(
    options: argparse.Namespace, *, is_here: bool = True, recipe_there: str | None = None
) -> Job:
    """What every rank is to run. A mistake in the recipe is told here, before anything starts.

    `is_here`: whether ranks run on this machine, where the data is looked at then; `recipe_there`:
    where the recipe lies for the ranks, if not where it does here.
    """
    from trainyard.config import load_recipe

    if is_here:
        config_of(options)
    else:
        check_recipe(options)
        load_recipe(options.recipe, options.overrides)
    run = run_folder(options)
    if options.doctor:
        options.restarts = 0  # what ails the machines is there the next time too
    arguments = ["doctor" if options.doctor else "train", recipe_there or options.recipe]
    arguments += ["--run", str(run)]
    arguments += [word for location in options.data or () for word in ("--data", location)]
    arguments += ["--json"] if options.json else []
    arguments += _voice(options)
    arguments += [f"--{key}={text}" for key, text in options.overrides.items()]
    return Job(tuple(arguments), run)


def check_writable(job: Job, file: str) -> None:
    """InputError where the command of a job, which goes into `file`, holds a login or a signature.

    The message names the word without it.
    """
    for word in job.arguments:
        if is_remote(word) and not word.startswith("--"):
            check_url(word)
        if without_secrets(word) != word:
            raise InputError(
                f"{without_secrets(word)}: holds a login or a signature, and would be written into "
                f"{file}: put the login into ~/.netrc on every host and leave it out here"
            )


def _voice(options: argparse.Namespace) -> list[str]:
    """How the ranks are to speak, but for those that examine machines: they have but one way."""
    given = [name for name in VOICES if getattr(options, name.replace("-", "_"))]
    return [] if options.doctor else [f"--{name}" for name in given]


def say(message: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        print(printable(f"trainyard: {message}"), file=sys.stderr)


def num_devices() -> int:
    """Of this machine: how many ranks it has if nothing is said."""
    import torch

    return max(torch.cuda.device_count(), 1)
