"""The command that every rank of a run executes."""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.children import SAFE_PATH
from trainyard.data.storage.credentials import check_url, without_secrets
from trainyard.data.storage.source import is_remote
from trainyard.errors import InputError

Say = Callable[[str], None]
"""Prints a message to the user."""
_PASSED_ON = ("GLOO_", "NCCL_", "OMP_", "TORCH_", "TRAINYARD_")


@dataclass(frozen=True)
class Job:
    """A Trainyard command that every rank runs, with its run directory and interpreter."""

    arguments: tuple[str, ...]
    """Words after `trainyard`: "train", the recipe, "--run", …"""
    run: Path
    """The run directory, relative to the working directory if the user gave it so."""
    python: str = sys.executable
    """The interpreter, which must have Trainyard on every host."""

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def command(self) -> tuple[str, ...]:
        return (self.python, *SAFE_PATH, "-m", "trainyard", *self.arguments)

    def of_agent(self, **options: object) -> "Job":
        """The command that runs the ranks of one machine; options that are None are left out."""
        what, *arguments = self.arguments
        given = {name.replace("_", "-"): value for name, value in options.items()}
        words = [f"--{name}={value}" for name, value in given.items() if value is not None]
        words += ["--doctor"] if what == "doctor" else []
        return replace(self, arguments=("launch", "agent", *arguments, *words))

    def check_writable(self, file: str) -> None:
        """InputError if a word, which is written into `file`, has a signature.

        The message shows the word without it.
        """
        for word in self.arguments:
            if is_remote(word) and not word.startswith("--"):
                check_url(word)
            if without_secrets(word) != word:
                raise InputError(
                    "launch.signature-written",
                    "{value}: holds a signature, and would be written into {name}: use a login in "
                    "~/.netrc, or a token in TRAINYARD_TOKENS, on every host",
                    value=without_secrets(word),
                    name=file,
                )


def job_of(
    options: argparse.Namespace, run: Path, flags: Iterable[str], *, command: str = "train"
) -> Job:
    """A command with the recipe, data and keys of options, and the `flags` that they set."""
    words = [command, options.recipe, "--run", str(run)]
    words += [word for location in options.data or () for word in ("--data", location)]
    words += [f"--{name}" for name in flags if getattr(options, name.replace("-", "_"))]
    words += [f"--{key}={text}" for key, text in options.overrides.items()]
    return Job(tuple(words), run)


def shown(command: Iterable[str]) -> str:
    """A command line as --dry-run prints it, without secrets."""
    return without_secrets(shlex.join(command))


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment variables that ranks on other hosts get too."""
    return {name: text for name, text in environment.items() if name.startswith(_PASSED_ON)}
