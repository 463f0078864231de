"""Run directories written by hand, as a run would write them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.training.predictions import Predictions
from trainyard.training.recorded import record

RECIPE = (
    '[model]\nname = "test_vit"\n[optim]\nlr = {lr}\n[run]\nlength = "100 steps"\nseed = {seed}\n'
)


def train_report(step: int, **figures: Any) -> dict[str, Any]:
    where = {"step": step, "epoch": step / 10, "samples": 32 * step, "time": 0.5 * step}
    return {"kind": "train", **where, "loss": 1 / step, "top1": 0.5, "lr": 0.1, **figures}


def write_run(
    folder: Path,
    reports: Sequence[dict[str, Any]],
    *,
    seed: int = 0,
    lr: float = 0.1,
    fold: str | None = None,
) -> Path:
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(report) + "\n" for report in reports)
    (folder / "metrics.jsonl").write_text(lines)
    data = "" if fold is None else f'[data]\ntrain = "photos"\nval_fold = "{fold}"\n'
    (folder / "recipe.toml").write_text(RECIPE.format(seed=seed, lr=lr) + data)
    return folder


def record_some(folder: Path, *, samples: int, classes: int, at: int = 10) -> None:
    """Predictions of so many samples, about half of them wrong."""
    random = np.random.default_rng(0)
    labels = np.arange(samples, dtype=np.int32) % classes
    is_right = random.random(samples) < 0.5
    guess = np.where(is_right, labels, random.integers(0, classes, samples))
    place = np.where(guess == labels, 1, 2)
    columns = [place, guess, random.random(samples), random.random(samples)]
    said = Predictions(*(column.astype(np.float32) for column in columns))
    record(folder / "predictions.npz", at, labels, said, weights="")
    step = folder / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    names = [f"class number {n}, with a name of some length" for n in range(classes)]
    counts: dict[str, Any] = dict.fromkeys(("skipped", "roll_backs"), 0)
    counts |= {"step": 10, "guard": {"running": 0}, "clock": {"total": 0.0}, "last": {}, "best": {}}
    (step / "progress.json").write_text(json.dumps({"version": 2, "classes": names} | counts))
    (folder / "checkpoints" / "best").symlink_to(step.name)
