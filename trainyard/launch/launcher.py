"""The interface of a launcher, and the options that several have. cli/launch.py has the table."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from trainyard.arguments import Parser, positive, whole_number
from trainyard.errors import InputError
from trainyard.launch.exit_codes import GRACE_S
from trainyard.launch.job import Job

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")

_WAIT_S = 300


class Launcher(ABC):
    """A way to start the ranks of a run."""

    summary: str
    """A few words for --help; "" for none, where no person is to give the command."""

    @abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add its own options to its parser, which has those of `train`, --dry-run and --doctor."""

    def is_here(self, options: argparse.Namespace) -> bool:
        """True if the ranks run on this machine, so that their data can be checked here."""
        return False

    @abstractmethod
    def plan(self, job: Job, options: argparse.Namespace) -> str:
        """The commands, the script or the manifest that `run` would start, for --dry-run.

        InputError for options that exclude each other.
        """

    @abstractmethod
    def run(self, job: Job, options: argparse.Namespace) -> int:
        """Start the ranks, or have a scheduler start them. Returns the command's exit code."""


def add_ranks(parser: Parser, where: str, *, gpus: Callable[[str], int] = positive) -> None:
    """Add --gpus and --ranks, which exclude each other. `where`: "each node"."""
    text = f"GPUs of {where}, with a rank for each"
    parser.add_argument("--gpus", type=gpus, metavar="N", help=text)
    text = f"processes on {where} (one per GPU, or 1)"
    parser.add_argument("--ranks", type=positive, metavar="N", help=text)


def add_restarts(parser: Parser, default: int = 0) -> None:
    """Add the option --restarts."""
    parser.add_argument(
        "--restarts",
        type=whole_number,
        default=default,
        metavar="N",
        help="how often all ranks are started again, and go on, after one has died "
        f"({default} if not given)",
    )


def add_wait(parser: Parser, what: str) -> None:
    """Add the option --wait, in seconds."""
    parser.add_argument(
        "--wait",
        type=whole_number,
        default=_WAIT_S,
        dest="wait_s",
        metavar="SECONDS",
        help=f"for {what} ({_WAIT_S} if not given)",
    )


def add_grace(parser: Parser) -> None:
    """Add the option --grace, in seconds, of a pod."""
    parser.add_argument(
        "--grace",
        type=positive,
        default=GRACE_S,
        metavar="S",
        help=f"seconds for the ranks to save when the pod is to end ({GRACE_S} if not given)",
    )


def record_of(kind: type[R], options: argparse.Namespace, **others: Any) -> R:
    """A record whose fields are the options of their names that are given, and `others`."""
    named = {field.name: vars(options).get(field.name) for field in fields(kind)}
    given = {name: value for name, value in named.items() if value is not None}
    return kind(**given | others)


def ranks_here(options: argparse.Namespace) -> int:
    """The number of ranks on this machine: the one given, else one per GPU, or one.

    InputError if it has fewer GPUs than --gpus asks for.
    """
    devices = num_gpus()
    if options.gpus and devices < options.gpus:
        raise InputError(
            "launch.too-few-gpus",
            "this host has {num_gpus} GPUs, not {num_wanted}",
            num_gpus=devices,
            num_wanted=options.gpus,
        )
    return int(options.ranks or options.gpus or max(devices, 1))


def num_gpus() -> int:
    """The number of GPUs that this process may use."""
    import torch

    return torch.cuda.device_count()
