"""examples/reference.py, a training in one file, has the losses and weights of `trainyard train`.

Equal to the last bit: see "The specification of a run" in docs/architecture.md.
"""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import run
from tests.spawn import launch
from trainyard.command_line import end
from trainyard.config import RunConfig, tree_as_toml
from trainyard.world import World

pytestmark = pytest.mark.slow

REFERENCE = Path(__file__).parent.parent / "examples/reference.py"

SMALL = {"data.image_size": "32", "batch.size": "48"}
# Recipe, ranks, and keys that make it small or add what no small recipe has.
RUNS: dict[str, tuple[str, int, dict[str, str]]] = {
    "adamw-ema-drop-path": (
        "digits",
        1,
        {"model.ema_decay": "0.98", "model.drop_path": "0.1"},
    ),
    "whitened-sgd-bf16": ("fashion-mnist", 1, {"run.length": "2 epochs", "batch.size": "60"}),
    "lamb-mixup-bf16": (
        "vit-b16-lamb-32k",
        1,
        {**SMALL, "model.name": "test_vit", "schedule.warmup": "1 epochs"},
    ),
    "accumulated-adam": (
        "resnet50-accum-adam",
        1,
        {
            **SMALL,
            "model.name": "test_resnet",
            "data.eval_size": "40",
            "average.topology": "one-peer-exponential",
        },
    ),
    "mixup-cutmix-micro-batches": (
        "debug",
        1,
        {
            "augment.mixup": "0.8",
            "augment.cutmix": "1.0",
            "augment.flip": "0.5",
            "augment.translate": "2",
            "batch.size": "60",
            "batch.micro": "25",
        },
    ),
    "two-ranks": ("digits", 2, {"batch.size": "63"}),
    "gossip-on-four-ranks": (
        "digits",
        4,
        {
            "average.name": "gossip",
            "optim.clip_norm": "1.0",
            "model.ema_decay": "0.9",
        },
    ),
}


def command(world: World, words: list[str]) -> None:
    """`trainyard` as one of a launcher's ranks."""
    end(run(*words))


def reference(world: World, words: list[str], stderr: Path) -> None:
    """`python examples/reference.py` as one of a launcher's ranks."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = [str(REFERENCE), *words]
    runpy.run_path(str(REFERENCE), run_name="__main__")


def few(folder: Path, count: int, into: Path) -> Path:
    """The first images of each class."""
    for name in sorted({path.parent.name for path in folder.glob("*/*")}):
        (into / name).mkdir(parents=True)
        for path in sorted((folder / name).iterdir())[:count]:
            shutil.copy(path, into / name)
    return into


@pytest.mark.parametrize("name", RUNS)
def test_equals_a_run_to_the_last_bit(name: str, digits: Path, tmp_path: Path) -> None:
    recipe, ranks, keys = RUNS[name]
    keys = {
        "run.length": "12 steps",
        "run.eval_every": "5 steps",
        "run.log_every": "3 steps",
        "run.save_every": "0 steps",
        "data.train": str(few(digits / "train", 25, tmp_path / "train")),
        "data.val": str(few(digits / "val", 6, tmp_path / "val")),
        **keys,
    }
    options = [word for key, value in keys.items() for word in (f"--{key}", value)]
    ours = ["train", recipe, *options, "--run", str(tmp_path / "run"), "--json"]
    assert launch(command, ranks, ours) == [0] * ranks
    theirs = [str(tmp_path / "run/recipe.toml"), str(tmp_path / "reference")]
    ends = launch(reference, ranks, theirs, tmp_path / "stderr")
    assert ends == [0] * ranks, (tmp_path / "stderr").read_text()

    expected = reports(tmp_path / "run")
    assert len(expected) >= 5
    assert reports(tmp_path / "reference") == expected
    weights = load_file(tmp_path / "run/checkpoints/latest/model.safetensors")
    found = load_file(tmp_path / "reference/model.safetensors")
    assert {key for key in weights if not torch.equal(weights[key], found.pop(key))} == set()
    assert not found


OTHER_VALUES: list[tuple[str, Any]] = [
    ("augment.randaugment", "rand-m9"),
    # False, 0 and other defaults that are not falsy were passed over.
    ("model.channels_last", False),
    ("schedule.warmup_prefix", False),
    ("schedule.weight_decay_end", 0.0),
    ("schedule.drop_path_start", 0.0),
    ("optim.backbone_lr", 0.0),
    ("average.overlap", False),
    ("run.bn_samples", 256),
    ("run.patience", 1),
    ("run.resume", "runs/other"),
    ("average.name", "periodic"),
    ("average.topology", "ring"),
    ("schedule.name", "sqrt"),
    ("optim.name", "lion"),
    ("batch.precision", "fp16"),
    ("data.image_size", [32, 48]),
    ("augment.erasing", 0.1),
    ("loss.name", "bce"),
]


@pytest.mark.quick
def test_ends_at_a_key_that_it_does_not_know(tmp_path: Path) -> None:
    """A reference that passes over a key would be no reference."""
    read_recipe = runpy.run_path(str(REFERENCE))["read_recipe"]
    usual = RunConfig().model_dump(mode="json", exclude_none=True)
    path = tmp_path / "recipe.toml"
    path.write_text(tree_as_toml(usual))
    assert read_recipe(path)["optim.lr"] == usual["optim"]["lr"]
    for key, value in OTHER_VALUES:
        section, _, name = key.partition(".")
        path.write_text(tree_as_toml(usual | {section: usual[section] | {name: value}}))
        with pytest.raises(SystemExit) as ended:
            read_recipe(path)
        assert f"{key} = {value!r}" in str(ended.value)


# Keys of the reference's own reports.
_TRAIN = ("kind", "step", "loss", "top1", "lr", "grad_norm")
_VAL = ("kind", "step", "loss", "top1", "ema_loss", "ema_top1")


def reports(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("kind") in ("train", "val")]
    keys = {"train": _TRAIN, "val": _VAL}
    return [{key: row[key] for key in keys[row["kind"]] if key in row} for row in rows]
