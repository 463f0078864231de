"""Runs to export: trained long enough to know some digits."""

from pathlib import Path

import pytest

from tests.command_line import run

_QUICK = ("--run.log_every", "20 steps", "--data.threads", "1", "--json")


@pytest.fixture(scope="session")
def convolutions(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with batch norm and a moving average of its weights. Not to be written to."""
    folder = tmp_path_factory.mktemp("convolutions") / "run"
    where = ("--data", digits, "--run", folder, "--model.ema_decay", "0.9")
    assert run("train", "digits", *where, "--run.length", "60 steps", *_QUICK) == 0
    return folder


@pytest.fixture(scope="session")
def transformer(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT of other images than timm's, evaluated at another size still, with an option."""
    folder = tmp_path_factory.mktemp("transformer") / "run"
    sizes = ("--data.image_size", "32", "--data.eval_size", "40", "--data.crop_pct", "0.9")
    options = ("--model.options", "{patch_size = 8}", "--run.length", "80 steps")
    assert run("train", "debug", "--data", digits, "--run", folder, *sizes, *options, *_QUICK) == 0
    return folder
