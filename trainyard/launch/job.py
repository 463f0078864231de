"""What a launcher starts, wherever it does."""

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """A command of Trainyard's that every rank runs, and where."""

    arguments: tuple[str, ...]
    """After `trainyard`: "train", the recipe, "--run", …"""
    run: Path
    """The run directory, relative to the working directory if the user gave it so."""
    python: str = sys.executable
    """The interpreter, which is to have Trainyard, on every host."""

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def command(self) -> tuple[str, ...]:
        return (self.python, "-m", "trainyard", *self.arguments)
