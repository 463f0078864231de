"""Initial weights of a run: from another run, a file, or timm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainyard.errors import CheckpointError
from trainyard.files import find_checkpoint
from trainyard.model.adapt import adapt_weights
from trainyard.model.config import ModelConfig
from trainyard.model.weights import LoadedWeights, pretrained_weights, read_weights
from trainyard.training import checkpoint
from trainyard.training.averages import prefix_of


def put_initial_weights(config: ModelConfig, model: nn.Module, classes: Sequence[str]) -> list[str]:
    """Load the weights of `model.checkpoint` into the model. Returns a log, as sentences."""
    if config.checkpoint is None:
        return []
    return adapt_weights(
        model,
        _source(config.checkpoint, config),
        classes=classes,
        name=config.name,
        prefix=config.checkpoint_prefix,
    )


def _source(asked: str, config: ModelConfig) -> LoadedWeights:
    if asked == "timm":
        return pretrained_weights(config.name)
    path = Path(asked)
    if path.is_file():
        return read_weights(path, config.checkpoint_key)
    if not path.is_dir():
        raise CheckpointError(f"model.checkpoint = {asked!r}: no such run, checkpoint or file")
    if config.checkpoint_key is not None:
        raise CheckpointError(f"model.checkpoint_key: {asked} is a folder, which has no entries")
    return _source_in(path)


def _source_in(folder: Path) -> LoadedWeights:
    """The weights of a checkpoint, or of a run's best or latest; see `prefers_average`."""
    _, path = find_checkpoint(folder)
    checkpoint.check(path)
    progress = checkpoint.read_progress(path)
    name = choose_weights(path, progress)
    kind = "the moving average of the weights" if name else "the weights"
    of = name.partition("-")[2]
    about = f"{path}, {kind}{f' of decay {of}' if of else ''}"
    return LoadedWeights(checkpoint.load_weights(path, name), about, progress["classes"])


def choose_weights(path: Path, progress: dict[str, Any], ema: bool | float | None = None) -> str:
    """The name of the weights to use in a checkpoint at `path`; see training/averages.py.

    `ema`: False for the weights themselves, True for their moving average, a decay for one of
    several. By default the average, unless both were evaluated when it was saved, and the weights
    scored higher. Of several averages the one that scored highest in the last evaluation before,
    and the shortest without one. CheckpointError if there is none.
    """
    averages, last = checkpoint.averages(path), progress["last"]
    by = progress.get("best_by", "top1")
    if ema is False or (ema is None and not averages):
        return ""
    if not averages:
        raise CheckpointError(f"{path}: has no moving average of the weights: leave --ema out")
    if ema is not None and ema is not True:
        return _of_decay(path, averages, ema)
    best = max(averages, key=lambda name: float(last.get(f"{prefix_of(name)}{by}", -1.0)))
    is_worse = last.get(f"{prefix_of(best)}{by}", 1.0) < last.get(by, 0.0)
    is_measured = last.get("step") == progress["step"]
    return "" if ema is None and is_measured and is_worse else best


def _of_decay(path: Path, averages: Sequence[str], decay: float) -> str:
    if f"ema-{decay}" in averages:
        return f"ema-{decay}"
    decays = ", ".join(name.removeprefix("ema-") for name in averages)
    has = "a single average: write --ema" if averages == ["ema"] else f"averages of {decays}"
    raise CheckpointError(f"{path}: has no average of decay {decay}, but {has}")
