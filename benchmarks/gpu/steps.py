"""Steps of the whole training loop beside a bare loop and timm's, with a batch at hand, in turns.

All three have a model, an optimizer (SGD with momentum) and a batch of their own kind in one
process, at bf16 with channels last. Blocks of steps take turns: between two blocks of Trainyard's
loop, which is `trainyard train` but for its data, the others run theirs. timm's loop is the inner
loop of its train.py, which its package does not include, written out: it reads the loss in every
step. A last block of each is profiled and not timed.
"""

import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from rich.console import Console
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.findings import Findings, run_part
from benchmarks.gpu.profile import Counting
from tests.data.batches import batch_of_images
from trainyard.config import RunConfig, load_recipe
from trainyard.data.batch import Batch
from trainyard.data.device.feed import TrainingFeed
from trainyard.datasets.prepare.digits import prepare_digits
from trainyard.model.flops import forward_flops
from trainyard.monitor.devices import peak_flops
from trainyard.run import trainer as run
from trainyard.world import World

_MODELS = {  # images a step
    "resnet50": 256,
    "vit_small_patch16_224": 256,
    "convnext_tiny": 256,
    "vit_base_patch16_224": 128,
}
_CLASSES, _LR, _MOMENTUM, _DECAY = 10, 0.01, 0.9, 5e-5
_WARM_UP = 12  # steps: Trainyard tries the micro-batch, compilers compile, allocators grow


class _Done(BaseException):
    """All blocks are timed."""


class _Setting:
    """One model, compiled or not, on a device."""

    def __init__(self, name: str, *, compiled: bool, dry: bool) -> None:
        self.name, self.compiled, self.dry = ("test_resnet" if dry else name), compiled, dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.size, self.count = (32, 4) if dry else (224, _MODELS[name])
        self.block, self.rounds = (2, 2) if dry else (20, 4)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.count, 3, self.size, self.size, generator=generator)
        labels = torch.randint(_CLASSES, (self.count,), generator=generator)
        self.images = images.to(self.device, memory_format=torch.channels_last)
        self.labels = labels.to(self.device)

    def model(self) -> nn.Module:
        model: Any = timm.create_model(self.name, num_classes=_CLASSES)
        model = model.to(self.device, memory_format=torch.channels_last).train()
        if self.compiled:
            model.compile()
        found: nn.Module = model
        return found

    def loss(self, model: nn.Module) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return F.cross_entropy(model(self.images), self.labels)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


Step = Callable[[], None]


def _bare(setting: _Setting) -> Step:
    model = setting.model()
    optimizer = torch.optim.SGD(
        model.parameters(), _LR, momentum=_MOMENTUM, weight_decay=_DECAY, fused=True
    )

    def step() -> None:
        setting.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timm(setting: _Setting) -> Step:
    model = setting.model()
    optimizer = create_optimizer_v2(model, "momentum", _LR, _DECAY, _MOMENTUM)
    seen = 0.0

    def step() -> None:
        nonlocal seen
        optimizer.zero_grad()
        loss = setting.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen += loss.item() * setting.count

    return step


class _Turns:
    """Hands Trainyard's loop its batches, and runs the other loops between its blocks."""

    def __init__(self, setting: _Setting) -> None:
        self._setting = setting
        self._others = {"bare loop": _bare(setting), "timm's loop": _timm(setting)}
        for step in self._others.values():
            _repeat(step, _WARM_UP)
        names = ("trainyard", *self._others)
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.counts: dict[str, dict[str, Any]] = {name: {} for name in names}
        self._taken = -_WARM_UP
        self._round = 0
        self._counting: Counting | None = None
        self._batch = batch_of_images(setting.images, setting.labels)

    def __call__(self, feed: TrainingFeed) -> Batch:
        if self._taken == 0:
            self._begin()
        elif self._taken == self._setting.block:
            self._end()
            self._run_others()
            self._round += 1
            self._begin()
        self._taken += 1
        return self._batch

    @property
    def _is_profiled(self) -> bool:
        return self._round == self._setting.rounds

    def _begin(self) -> None:
        if self._round > self._setting.rounds or (self._is_profiled and self._setting.dry):
            raise _Done
        self._taken = 0
        self._setting.finish()
        if self._is_profiled:
            self._counting = Counting()
            self._counting.start()
        self._peak = _PeakMemory(self._setting)
        self._started = time.perf_counter()

    def _end(self, name: str = "trainyard") -> None:
        self._setting.finish()
        seconds = (time.perf_counter() - self._started) / self._setting.block
        if self._counting is None:
            self.seconds[name].append(seconds)
            self.counts[name] = {"GB above what stays": self._peak.gigabytes()}
        else:
            self.counts[name] |= self._counting.stop(self._setting.block)
            self._counting = None

    def _run_others(self) -> None:
        for name, step in self._others.items():
            self._begin()
            _repeat(step, self._setting.block)
            self._end(name)


class _PeakMemory:
    """Memory that a block takes besides what is allocated when it begins: activations mostly."""

    def __init__(self, setting: _Setting) -> None:
        self._on = setting.device.type == "cuda"
        if self._on:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def gigabytes(self) -> float | None:
        return (torch.cuda.max_memory_allocated() - self._before) / 1e9 if self._on else None


def _repeat(step: Step, count: int) -> None:
    for _ in range(count):
        step()


def _config(setting: _Setting, folder: Path) -> RunConfig:
    recipe = folder / "steps.toml"
    recipe.write_text("")
    options = {
        "data.train": str(folder / "digits" / "train"),
        "data.val": str(folder / "digits" / "val"),
        "data.image_size": str(setting.size),
        "data.threads": "1",
        "model.name": setting.name,
        "model.channels_last": "true",
        "model.compile": "default" if setting.compiled else "off",
        "batch.size": str(setting.count),
        "batch.precision": "bf16",
        "optim.lr": str(_LR),
        "optim.momentum": str(_MOMENTUM),
        "optim.weight_decay": str(_DECAY),
        "run.length": f"{_WARM_UP + (setting.rounds + 3) * setting.block} steps",
        "run.eval_every": "0 steps",
        "watch.bounds_minutes": "0",
    }
    return load_recipe(str(recipe), options)


def _measured(setting: _Setting, folder: Path) -> list[dict[str, Any]]:
    turns = _Turns(setting)
    untouched = TrainingFeed.__next__
    TrainingFeed.__next__ = lambda feed: turns(feed)  # type: ignore[method-assign, assignment]
    place = folder / f"{setting.name}-{setting.compiled}"
    try:
        run.train(_config(setting, folder), place, world=World(), console=Console(quiet=True))
    except _Done:
        pass
    finally:
        TrainingFeed.__next__ = untouched  # type: ignore[method-assign]
    peak = peak_flops(setting.device, "bf16")
    flops = 3.0 * forward_flops(timm.create_model(setting.name, num_classes=_CLASSES), setting.size)
    ours = statistics.median(turns.seconds["trainyard"])
    return [
        {
            "model": setting.name,
            "compiled": "yes" if setting.compiled else "no",
            "loop": name,
            "ms a step": (median := statistics.median(seconds)) * 1e3,
            "least": min(seconds) * 1e3,
            "most": max(seconds) * 1e3,
            "images/s": setting.count / median,
            "trainyard is": f"{median / ours:.3f} x",
            "MFU": f"{flops * setting.count / median / peak:.1%}" if peak else None,
            **turns.counts[name],
        }
        for name, seconds in turns.seconds.items()
    ]


def _rows(model: str, *, compiled: bool, dry: bool, folder: Path) -> list[dict[str, Any]]:
    """The rows of a model; its error, so that the others are still measured."""
    try:
        return _measured(_Setting(model, compiled=compiled, dry=dry), folder)
    except Exception as error:
        if dry:
            raise
        return [{"model": model, "loop": f"{type(error).__name__}: {error}"[:300]}]


def _compiled_beside(rows: list[dict[str, Any]], model: str) -> dict[str, Any] | None:
    """How much faster Trainyard's loop is compiled; None if one of the two failed."""
    found = {
        row["compiled"]: row["ms a step"]
        for row in rows
        if row["model"] == model and row["loop"] == "trainyard"
    }
    if len(found) < 2:
        return None
    kind = type(timm.create_model(model)).__name__
    return {"model": model, "class": kind, "compiled is": f"{found['no'] / found['yes']:.3f} x"}


def measure(findings: Findings, dry: bool) -> None:
    torch.set_float32_matmul_precision("highest")
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare_digits(folder / "digits")
        ways = [False] if dry else [False, True]
        for compiled, model in product(ways, ["resnet50"] if dry else _MODELS):
            found = _rows(model, compiled=compiled, dry=dry, folder=folder)
            for row in found:
                findings.add("bf16, channels last, 224 pixels", row)
            rows += found
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    for model in _MODELS:
        if beside := _compiled_beside(rows, model):
            findings.add("classes for model.compile = 'auto' (model/execution.py)", beside)


if __name__ == "__main__":
    run_part(measure)
