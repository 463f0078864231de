"""The command that a launcher starts on every rank."""

import sys
from dataclasses import dataclass
from pathlib import Path


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
        return (self.python, "-m", "trainyard", *self.arguments)
