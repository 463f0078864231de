"""The command that every rank of a run executes."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainyard.children import SAFE_PATH

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


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment variables that ranks on other hosts get too."""
    return {name: text for name, text in environment.items() if name.startswith(_PASSED_ON)}
