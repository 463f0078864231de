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
    use_average = prefers_average(path, progress)
    kind = "the moving average of the weights" if use_average else "the weights"
    weights = checkpoint.load_weights(path, ema=use_average)
    return LoadedWeights(weights, f"{path}, {kind}", progress["classes"])


def prefers_average(path: Path, progress: dict[str, Any]) -> bool:
    """True if a checkpoint at `path` has a moving average of the weights to prefer.

    False if both were evaluated when it was saved, and the weights themselves scored higher.
    """
    last = progress["last"] if progress["last"].get("step") == progress["step"] else {}
    by = progress.get("best_by", "top1")
    is_worse = last.get(f"ema_{by}", 1.0) < last.get(by, 0.0)
    return checkpoint.has_ema(path) and not is_worse
