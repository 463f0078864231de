"""Data sets and recipes that several tests share."""

from pathlib import Path

import pytest

from trainyard.config import RunConfig, load_recipe
from trainyard.data.digits import prepare_digits


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The handwritten digits as an image folder with train and val. Not to be written to."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    prepare_digits(folder)
    return folder


@pytest.fixture
def debug_recipe(digits: Path) -> RunConfig:
    """The debug recipe (a tiny transformer, no batch norm) on the digits."""
    return load_recipe(
        "debug", {"data.train": str(digits / "train"), "data.val": str(digits / "val")}
    )
