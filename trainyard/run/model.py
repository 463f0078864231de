"""The model of a recipe."""

from pathlib import Path

from torch import nn

from trainyard.config import RunConfig
from trainyard.course import stage_size
from trainyard.distributed import discover_or_alone
from trainyard.image_size import num_pixels
from trainyard.model.build import build_model
from trainyard.model.execution import recompute_activations
from trainyard.model.freeze import freeze, freeze_statistics
from trainyard.own_code import announce, is_own
from trainyard.training import checkpoint


def build_run_model(config: RunConfig, num_classes: int) -> nn.Module:
    """The model for every image size of the recipe, freshly initialised, with frozen parameters."""
    announce_own("model.name", config.model.name)
    sizes = {config.data.image_size, *map(stage_size, config.schedule.image_size)}
    largest = max(sizes, key=num_pixels)  # position embeddings get the finest trained grid
    if config.data.eval_size is not None:
        sizes.add(config.data.eval_size)
    model = build_model(
        config.model,
        num_classes=num_classes,
        image_size=largest,
        other_sizes=sizes - {largest},
        channels=config.data.channels,
    )
    freeze(model, config.model.freeze)
    if config.model.freeze_statistics:
        freeze_statistics(model.modules())
    if config.model.grad_checkpointing:
        recompute_activations(model, config.model.name)
    return model


def trained_model(config: RunConfig, path: Path, num_classes: int, weights: str) -> nn.Module:
    """The model of a recipe with weights of a checkpoint, or a moving average, by its name."""
    model = build_run_model(config, num_classes)
    checkpoint.put_weights(model, checkpoint.load_weights(path, weights), path)
    return model


def announce_own(key: str, name: str | None) -> None:
    """Print, on the first rank, the user's own file that a recipe key imports, if it does."""
    if name is not None and is_own(name) and discover_or_alone().is_first:
        announce(key, name)
