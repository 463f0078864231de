"""Runs to report on."""

import shutil
from pathlib import Path

import pytest

from tests.command_line import run

STEPS = 12


@pytest.fixture(scope="session")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that differ in their seed alone, with a moving average; not to be written to."""
    parent = tmp_path_factory.mktemp("trained")
    folders = [parent / "seed0", parent / "seed1"]
    for seed, folder in enumerate(folders):
        recipe = ("--run.seed", seed, "--model.ema_decay", 0.5, "--run.length", f"{STEPS} steps")
        every = ("--run.eval_every", "4 steps", "--run.log_every", "1 steps")
        place = ("--data", digits, "--run", folder, "--data.threads", 1, "--json")
        assert run("train", "debug", *place, *recipe, *every) == 0
    return folders


@pytest.fixture
def copied(trained: list[Path], tmp_path: Path) -> Path:
    """A run that may be written to."""
    return Path(shutil.copytree(trained[0], tmp_path / "run", symlinks=True))
