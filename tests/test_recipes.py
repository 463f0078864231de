"""Every built-in recipe: its full model, its schedule, and two steps of it in small."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.tiers import tiered
from trainyard.config import RunConfig, builtin_recipes, load_recipe
from trainyard.run.build import build_run_course, build_run_schedule
from trainyard.run.model import build_run_model
from trainyard.run.trainer import train
from trainyard.world import World

NAMES = list(builtin_recipes())
IMAGENET = 1_281_167

# The narrowest model of each family; what else a recipe says of its model stays.
NARROW = {
    "resnet": "test_resnet",
    "convnext": "test_convnext",
    "vit": "test_vit",
    "plain_vit": "test_vit",
    "deit": "test_vit",
}

# Parameters in millions, as the papers have them.
MILLIONS = {
    "convnext-tiny": 28.6,
    "convnext-small": 50.2,
    "convnext-base": 88.6,
    "convnext-large": 197.8,
    "resnet18-step": 11.7,
    "resnet50-sgd": 25.6,
    "vit-b16-lamb-32k": 86.6,
    "vit-b32-lamb-32k": 88.2,
    "vit-l32-lamb-32k": 306.5,
    "vit-s16-90ep": 22.0,
    "deit3-small": 22.1,
}


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_its_model_is_the_published_one(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = build_run_model(load_recipe(name), 1000)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("name", NAMES)
def test_its_schedule_over_imagenet(name: str) -> None:
    config = load_recipe(name)
    course = build_run_course(config, IMAGENET)
    schedule = build_run_schedule(config, course)
    steps = range(0, course.num_steps, max(course.num_steps // 1000, 1))
    rates = [schedule(step).lr for step in steps]
    assert all(math.isfinite(rate) and 0 <= rate <= config.optim.lr for rate in rates)
    assert max(rates) == pytest.approx(config.optim.lr, rel=0.02)
    if config.schedule.name != "constant":
        assert schedule(course.num_steps - 1).lr < 0.02 * config.optim.lr + config.schedule.min_lr


def narrow(model: str) -> str:
    """The narrowest model of a model's family."""
    families = (small for family, small in NARROW.items() if model.startswith(family))
    return next(families, model)


def in_small(name: str, digits: Path) -> RunConfig:
    """The recipe on the digits with the narrowest model of its family, a batch of 8, two steps."""
    config = load_recipe(name)
    changes: dict[str, Any] = {
        "data.train": str(digits / "train"),
        "data.val": str(digits / "val"),
        "model.name": narrow(config.model.name),
        "data.image_size": "32",
        "data.eval_size": "32",
        "batch.size": "8",
        "run.length": "2 steps",
        "run.eval_every": "2 steps",
        "run.bn_samples": "16" if config.run.bn_samples else "0",
    }
    if config.model.checkpoint == "timm":  # without a download
        of_weights = ("model.linear_probe", "model.freeze_statistics")
        changes |= {"model.checkpoint": None} | dict.fromkeys(of_weights, False)
    if config.schedule.image_size:
        changes["schedule.image_size"] = '["1 step: 48"]'
    return load_recipe(name, changes)


RARE = {*NAMES} - {"digits", "resnet50-a1", "deit3-small"}  # one each of the families


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(NAMES, quick=["digits"], night=RARE))
def test_two_steps_of_it_in_small(name: str, digits: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = in_small(name, digits)
    outcome = train(config, tmp_path / "run", world=World(), console=Console(quiet=True))
    assert outcome.step == 2
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert math.isfinite(lines[-1]["loss"])
    assert not any(line.get("skipped") for line in lines)
    assert ("ema_top1" in lines[-1]) == (config.model.ema_decay is not None)
