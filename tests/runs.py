"""Whole runs of the debug recipe, in processes that are cut off, and what is left of them."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import loaders
from tests.command_line import newest, run
from tests.spawn import _CONTEXT, end_by, train_joined
from trainyard.config import RunConfig, load_recipe
from trainyard.data.batch import Batch
from trainyard.monitor.meters import StepStats
from trainyard.training.saver import point
from trainyard.training.step import TrainStep
from trainyard.world import World

NUM_STEPS = 24  # of 64 samples: an epoch of 1,433 ends in step 23
OPTIONS = {
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "5 steps",
    "run.eval_every": "8 steps",
    "run.log_every": "1 step",
    "batch.size": "64",
    "data.threads": "1",
}
RESNET = {"model.name": "test_resnet", "data.image_size": "16"}  # with batch norm

Lines = list[dict[str, Any]]
Hook = Callable[[TrainStep, Any, int], None]


def of_digits(digits: Path) -> dict[str, str]:
    return {"data.train": str(digits / "train"), "data.val": str(digits / "val")}


def recipe(digits: Path, *changes: dict[str, str]) -> RunConfig:
    options = OPTIONS | of_digits(digits)
    for change in changes:
        options |= change
    return load_recipe("debug", options)


def words(digits: Path | None, folder: Path, *changes: dict[str, str]) -> list[str]:
    """The command that trains in `folder`."""
    options = dict(OPTIONS)
    for change in changes:
        options |= change
    data = ["--data", str(digits)] if digits else []
    keys = [word for key, value in options.items() for word in (f"--{key}", value)]
    return ["train", "debug", *data, "--run", str(folder), "--json", *keys]


# --- processes ---


def on_each_step(before: Hook | None = None, after: Hook | None = None) -> None:
    """Has this process call functions before and after each of its steps from now on."""
    TrainStep.__call__ = _hooked(before, after)  # type: ignore[method-assign]


@contextmanager
def hooked(before: Hook | None = None, after: Hook | None = None) -> Iterator[None]:
    """Inside, this process calls functions before and after each of its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", _hooked(before, after))
        yield


def _hooked(before: Hook | None, after: Hook | None) -> Callable[..., StepStats]:
    take = TrainStep.__call__

    def hooked(self: TrainStep, batch: Batch, step: int, rates: Any) -> StepStats:
        if before:
            before(self, batch, step)
        stats = take(self, batch, step, rates)
        if after:
            after(self, batch, step)
        return stats

    return hooked


def command(arguments: list[str], stop_at: int | None = None, number: int = 0) -> None:
    """What `python -m trainyard` does, and a signal to itself in the midst of step `stop_at`."""
    loaders.install_in_fork()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    on_each_step(after=lambda _, batch, step: end_by(number) if step + 1 == stop_at else None)
    sys.exit(run(*arguments))


def forked(target: Callable[..., None], *arguments: Any) -> Any:
    """A process forked from one that has loaded torch already: seconds less than a fresh one."""
    process = _CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def ended(target: Callable[..., None], *arguments: Any) -> int:
    """The exit code of a process."""
    process = forked(target, *arguments)
    process.join(240)
    assert process.exitcode is not None
    return int(process.exitcode)


def exit_code(arguments: list[str], stop_at: int | None = None, number: int = 0) -> int:
    return ended(command, arguments, stop_at, number)


# --- ranks ---

Seen = list[tuple[int, list[int]]]
"""Steps and the ids that a rank updated with."""


def train(world: World, config: RunConfig, folder: Path) -> None:
    torch.set_num_threads(1)
    assert train_joined(config, folder, world).stopped is None


def interleaved(ranks: list[Seen]) -> dict[int, list[int]]:
    """Global batches by step, from those of each rank."""
    stream = {}
    for parts in zip(*ranks, strict=True):
        (step,) = {step for step, _ in parts}
        ids = np.zeros(sum(len(ids) for _, ids in parts), int)
        for rank, (_, share) in enumerate(parts):
            ids[rank :: len(parts)] = share
        stream[step] = ids.tolist()
    return stream


def cut_off(whole: Path, folder: Path, step: int) -> Path:
    """A copy of a run as it was when it had saved a step."""
    # Stacks are of ranks, of which some are still leaving the run.
    shutil.copytree(whole, folder, symlinks=True, ignore=shutil.ignore_patterns("stacks"))
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    for link in ("latest", "best"):
        point(folder / "checkpoints" / link, folder / "checkpoints" / f"step-{step:08d}")
    lines = [line for line in read(folder) if line["step"] <= step]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


# --- what came of it ---


def read(folder: Path) -> Lines:
    """Every line of a run's metrics.jsonl, each of them whole."""
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def events(folder: Path, name: str) -> Lines:
    return [line for line in read(folder) if line.get("event") == name]


def curve(folder: Path, kind: str, *keys: str) -> dict[int, list[float]]:
    """The last word of metrics.jsonl on each step."""
    return {x["step"]: [x[k] for k in keys] for x in read(folder) if x["kind"] == kind}


def progress(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "progress.json").read_text())
    return found


def contents(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds, but for rates, which are set before each step, and the clock."""
    files = [checkpoint / "training.pt", *sorted(checkpoint.glob("replicas/*.pt"))]
    found = {file.name: torch.load(file, weights_only=True) for file in files}
    for state in found.values():
        for group in state.get("optimizer", {}).get("param_groups", ()):
            group.pop("lr", None)
    found |= {file.stem: load_file(file) for file in checkpoint.glob("*.safetensors")}
    found["progress"] = progress(checkpoint)
    del found["progress"]["clock"]
    return found


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_equal(mine, yours)
    else:
        assert one == other


def assert_same_end(folder: Path, uninterrupted: Path, num_steps: int = NUM_STEPS) -> None:
    """Weights, optimizer, evaluations and the losses of all steps, bit for bit."""
    ours, theirs = newest(folder), newest(uninterrupted)
    assert ours.name == theirs.name == f"step-{num_steps:08d}"
    assert progress(ours)["last"]["step"] == num_steps
    found, expected = contents(ours), contents(theirs)
    assert found.pop("progress") == expected.pop("progress")
    assert_equal(found, expected)
    for kind, *keys in (("val", "top1", "top5", "loss"), ("train", "loss", "lr")):
        assert curve(folder, kind, *keys) == curve(uninterrupted, kind, *keys)
